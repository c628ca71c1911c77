"""What the router remembers of its requests."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from headwater.errors import PeerUnavailable
from headwater.lifecycle import Event
from router.history import History, Leg


def test_a_request_s_events_and_groups_are_kept_in_order() -> None:
    history = History(clock=itertools.count(10.0).__next__)
    with history.follow("r") as record:
        record.tokenized(100)
        record.paired("p0", "d0")
        record.prefilling("p0", "r")
        record.progress(64)
        record.prefilling("p1", "r")
        assert (record.event, record.num_tokens_done, record.ended) == (Event.RESUMED, 64, False)
        record.redirected("d1")
        # Anew, on others.
        record.paired("p2", "d2")
        assert record.num_tokens_done == 0
        record.prefilling("p2", "r~2")
        assert history.running() == [record]
        record.finished("stop")
    assert (history.running(), history.ended()) == ([], [record])
    assert record.events == [
        (Event.RECEIVED, 10.0),
        (Event.TOKENIZED, 11.0),
        (Event.PAIRED, 12.0),
        (Event.ADMITTED, 13.0),
        (Event.RESUMED, 14.0),
        (Event.REDIRECTED, 15.0),
        (Event.PAIRED, 16.0),
        (Event.ADMITTED, 17.0),
        (Event.FINISHED, 18.0),
    ]
    assert record.legs == [Leg("p0", "r"), Leg("p1", "r"), Leg("p2", "r~2")]
    assert (record.prefill, record.decode, record.outcome) == ("p2", "d2", "stop")


def test_what_ends_the_context_ends_the_request_unless_its_answer_was_complete() -> None:
    history = History()
    with pytest.raises(PeerUnavailable), history.follow("failed") as failed:
        raise PeerUnavailable("x" * 1000)
    with pytest.raises(asyncio.CancelledError), history.follow("cancelled") as cancelled:
        raise asyncio.CancelledError
    # A defect may say anything, of prompts too.
    with pytest.raises(KeyError), history.follow("defect") as defect:
        raise KeyError("secret")
    with pytest.raises(asyncio.CancelledError), history.follow("finished") as finished:
        finished.finished("length")
        raise asyncio.CancelledError
    assert [(r.event, r.outcome, r.detail) for r in (failed, cancelled, defect, finished)] == [
        (Event.FAILED, "PeerUnavailable", "x" * 500),
        (Event.CANCELLED, "cancelled", ""),
        (Event.FAILED, "KeyError", ""),
        (Event.FINISHED, "length", ""),
    ]


def test_so_many_are_remembered_and_the_newest_of_an_id_is_found() -> None:
    history = History(remembered=2)
    for request_id in ("a", "b", "a", "c"):
        with history.follow(request_id) as record:
            record.finished("length")
    assert [(record.number, record.request_id) for record in history.ended()] == [(4, "c"), (3, "a")]
    with history.follow("a") as again:
        assert history.find("a") is again
    assert history.find("b") is None
    assert history.find("a") is again
