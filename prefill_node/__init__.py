"""A prefill group: a leader that decides (no torch) and PP×TP workers that compute.

The leader owns the queue, the page tables and the plan; workers apply one ordered log of entries and report
back. Modules `leader`, `links`, `scheduler`, `pages` and `service` are the leader's; `worker`, `stage`,
`attention`, `kv_pool`, `pipeline`, `sampling` and `deliveries` are the workers'.
"""
