"""The less loaded of two that are drawn (Mitzenmacher 2001: The power of two choices in randomized load balancing).

Routers that do not know of each other and all see the same old news do not all choose the same group.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies import Candidate
from router.policies.least_loaded import load


def choose(candidates: Sequence[Candidate], turn: int) -> int:
    """See `router.policies.Policy`. The draw depends on the turn, which every router counts from elsewhere."""
    if len(candidates) == 1:
        return 0
    one, other = random.Random(turn).sample(range(len(candidates)), 2)  # noqa: S311 - no secret
    return min(one, other, key=lambda place: load(candidates[place]))
