"""A prefill group: a leader that decides (no torch) and PP×TP workers that compute.

The leader owns the queue, the page tables and the plan; workers apply one ordered log of entries and report
back over connections (`links`, `control`, `frames`). Modules `group`, `leader`, `scheduler` and `pages` are the
leader's; `worker`, `steps`, `stage`, `attention`, `kv_pool`, `pipeline`, `sampling` and `deliveries` the workers'.
"""
