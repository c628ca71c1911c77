"""How KV moves: geometry, copy planner, transfer engines, sender and receiver.

Works on addresses and sizes and knows no tensors; what fills the source pages and what reads the
destination is somebody else's business.
"""
