"""Which of several groups a request goes to: pure functions of what is known of them, one to a file.

Who cannot take the request is not among the candidates (`router.pairing`). Whether there is room is not judged: what is
known is up to a heartbeat old, and a group that is full says so itself, at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy may know of one group.

    Attributes:
        requests: there, by the group's own count or by what this router has sent it, whichever is more.
        tokens_ahead: prompt tokens that were sent to it and are not computed yet; of decode groups, tokens in its pool.
        free_tokens: of its pool, by its own count less what was sent since.
        seconds_ahead: predicted time until it has computed what it has, by its own costs; None: not known.
        own_seconds: predicted time of this prompt there, from its first step to its first token, and until the KV of
            its last chunk has arrived; None: not known.
        cached_tokens: of this prompt's beginning, which need not be computed there, as far as this router knows.
        saved_seconds: how much longer `own_seconds` would be without them; 0 where that is not known.
    """

    requests: int
    tokens_ahead: int
    free_tokens: int
    seconds_ahead: float | None = None
    own_seconds: float | None = None
    cached_tokens: int = 0
    saved_seconds: float = 0.0


# Which of the candidates (at least one), by its place; the second argument counts the router's requests.
Policy = Callable[[Sequence[Candidate], int], int]


def least(keys: Sequence[tuple[float, ...]], turn: int) -> int:
    """The place of the least of `keys`; ties go by turns."""
    best = min(keys)
    tied = [place for place, key in enumerate(keys) if key == best]
    return tied[turn % len(tied)]
