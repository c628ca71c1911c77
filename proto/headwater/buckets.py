"""Buckets of every process's histograms, so that dashboards can lay one over another."""

from __future__ import annotations

# Of what a prompt may take: from 10 ms to 20 min.
REQUEST_SECONDS = (0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
# Of one step, write or message: from 0.1 ms to 100 s.
STEP_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
# The parts of a request may be as short as one message, and as long as the request.
PART_SECONDS = (0.0001, 0.001, *REQUEST_SECONDS)
# From 1 MB/s to 100 GB/s.
BYTES_PER_SECOND = (1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)
