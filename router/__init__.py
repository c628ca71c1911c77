"""The front door: pairs each request with a prefill and a decode group and joins their two streams into one.

Also home of the `headwater` command, which is composed of what every package adds to it. Knows the groups
only by their gRPC contract.
"""
