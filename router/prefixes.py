"""Which beginnings of prompts a prefill group has, as far as this router can know: those of the prompts it sent there.

A belief, not news: it does not count the prompts of other routers, nor what the group had to give up for requests that
ran. A wrong belief costs time and nothing else, so digests of 64 bits are enough here; the group compares tokens.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from headwater.tokens import TOKEN_BYTES

# Coarser than the pages of a group, so that a prompt of a million tokens has 4,096 blocks and not 16,384.
BLOCK_TOKENS = 256


def blocks_of(tokens: bytes) -> tuple[int, ...]:
    """For each whole block of a prompt, a digest of all tokens up to its end. The last token, which is always computed,
    is in none.
    """
    size = BLOCK_TOKENS * TOKEN_BYTES
    digest, view = xxhash.xxh3_64(), memoryview(tokens)
    blocks = []
    for start in range(0, len(tokens) - size, size):
        digest.update(view[start : start + size])
        blocks.append(digest.intdigest())
    return tuple(blocks)


class Prefixes:
    """Of one incarnation of a group. Holds as many blocks as the group's pool, the latest."""

    def __init__(self) -> None:
        # Oldest first. Of one prompt the last block is the oldest, so whatever precedes a known block is known.
        self._known: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """How many tokens of a prompt with these blocks the group has, from the first on."""
        return BLOCK_TOKENS * bisect.bisect_left(blocks, True, key=lambda block: block not in self._known)

    def add(self, blocks: Sequence[int], capacity_tokens: int) -> None:
        """A prompt was sent to the group, whose pool holds `capacity_tokens`."""
        for block in reversed(blocks):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > capacity_tokens // BLOCK_TOKENS:
            self._known.popitem(last=False)
