"""Random draws that every process computes alike.

Prefill samples the first token and decode the others, possibly again after a retry; a draw must therefore
depend on nothing but the request's seed and the token's position.
"""

from __future__ import annotations

import hashlib


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, from BLAKE2b of (seed, position).

    Args:
        seed: 0 ≤ seed < 2^64.
        position: of the token in the sequence (prompt and answer), from 0.
    """
    message = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
    return (bits >> 11) / (1 << 53)
