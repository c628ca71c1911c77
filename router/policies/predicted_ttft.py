"""The least predicted time to the first token: what the group has to do before, and then this prompt and its transfer.

Predicted by each group's own costs (t = c + γ·L + β·x + α·(2·L·x + x²), refined while it serves), so groups of
different layouts and machines are told apart, and so is one that has the prompt's beginning in its cache. When one of
the candidates has measured nothing yet, the least loaded is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies import Candidate, least, least_loaded


def choose(candidates: Sequence[Candidate], turn: int) -> int:
    """See `router.policies.Policy`."""
    seconds = [
        (candidate.seconds_ahead + candidate.own_seconds,)
        for candidate in candidates
        if candidate.seconds_ahead is not None and candidate.own_seconds is not None
    ]
    if len(seconds) < len(candidates):
        return least_loaded.choose(candidates, turn)
    return least(seconds, turn)
