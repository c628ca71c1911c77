"""The fewest requests; then the fewest tokens ahead; then the most free tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies import Candidate, least


def load(candidate: Candidate) -> tuple[float, ...]:
    return (candidate.requests, candidate.tokens_ahead, -candidate.free_tokens)


def choose(candidates: Sequence[Candidate], turn: int) -> int:
    """See `router.policies.Policy`."""
    return least([load(candidate) for candidate in candidates], turn)
