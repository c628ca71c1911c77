"""The longest cached prefix, traded against load in predicted seconds.

As `predicted_ttft`, but what a cached prefix saves counts twice: this prompt has its first token sooner by so much, and
the group is free for others sooner by so much. So a prompt goes where its beginning is unless that group's backlog is
longer by more than twice what computing the beginning takes, and few copies of a prefix crowd out others. When one of
the candidates has measured nothing yet, tokens stand for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies import Candidate, least, least_loaded


def choose(candidates: Sequence[Candidate], turn: int) -> int:
    """See `router.policies.Policy`."""
    seconds = [
        (candidate.seconds_ahead + candidate.own_seconds - candidate.saved_seconds,)
        for candidate in candidates
        if candidate.seconds_ahead is not None and candidate.own_seconds is not None
    ]
    if len(seconds) == len(candidates):
        return least(seconds, turn)
    tokens = [
        (candidate.tokens_ahead - 2 * candidate.cached_tokens, *least_loaded.load(candidate))
        for candidate in candidates
    ]
    return least(tokens, turn)
