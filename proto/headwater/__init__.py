"""The conventions that every Headwater process shares.

What crosses a process border is decided here: messages (`headwater.v1`), errors and their gRPC codes
(`headwater.errors`), servers and channels (`headwater.rpc`), lifecycle events and logs
(`headwater.lifecycle`), and the cluster file (`headwater.cluster`). Nothing here knows what a process does.
"""
