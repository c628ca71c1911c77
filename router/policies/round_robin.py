"""One after the other, whatever they have to do."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies import Candidate


def choose(candidates: Sequence[Candidate], turn: int) -> int:
    """See `router.policies.Policy`."""
    return turn % len(candidates)
