"""The leader's memory of what was computed and sent."""

from __future__ import annotations

from headwater.v1 import worker_pb2
from prefill_node.history import _REMEMBERED, History, Sent, StageRun


def test_a_trace_holds_what_was_computed_between_the_request_s_coming_and_its_end() -> None:
    history = History()
    history.ran(StageRun(0, 0, (("earlier", 0, 8),), 1.0, 1.9))
    history.begin("r", 2.0)
    history.ran(StageRun(0, 1, (("other", 8, 16),), 1.9, 2.5))
    history.ran(StageRun(0, 2, (("r", 0, 4), ("other", 16, 20)), 2.5, 3.0))
    history.sent(Sent(3, worker_pb2.SentBox(request_id="r", token_start=0, token_end=4, num_bytes=99), 3.0, 3.25))
    history.end("r", 3.5)
    history.ran(StageRun(0, 3, (("later", 0, 8),), 4.0, 5.0))
    # What is acknowledged after the caller has left still counts.
    history.sent(Sent(2, worker_pb2.SentBox(request_id="r", token_start=0, token_end=4, num_bytes=1), 3.0, 4.5))
    trace = history.trace("r", 1)
    assert trace is not None
    assert [(s.request_id, s.token_start, s.token_end, s.start, s.end) for s in trace.stages] == [
        ("other", 8, 16, 1.9 - 2.0, 0.5),
        ("r", 0, 4, 0.5, 1.0),
        ("other", 16, 20, 0.5, 1.0),
    ]
    assert [(t.rank, t.num_bytes, t.start, t.end) for t in trace.transfers] == [(3, 99, 1.0, 1.25), (2, 1, 1.0, 2.5)]
    assert history.trace("unknown", 1) is None


def test_only_so_many_are_remembered() -> None:
    history = History()
    for number in range(_REMEMBERED + 1):
        history.begin(f"r{number}", 0.0)
        history.end(f"r{number}", 1.0)
    assert history.trace("r0", 1) is None
    assert history.trace("r1", 1) is not None


def test_computing_is_split_by_whose_chunks_they_were_and_counted_once() -> None:
    history = History()

    def ran(stage: int, owners: str, start: float, end: float) -> None:
        history.ran(StageRun(stage, 0, tuple((owner, 0, 1) for owner in owners), start, end))

    ran(1, "b", 0.0, 2.0)
    ran(1, "a", 2.0, 3.0)
    ran(0, "a", 0.0, 4.0)
    # Reported late: it seems to have begun before the one before had ended.
    ran(1, "ab", 2.5, 5.0)
    ran(1, "b", 5.5, 6.0)
    ran(1, "a", 6.0, 8.0)
    # From within the first run to within the last: a has 2 to 5 and 6 to 7, b alone 1 to 2 and 5.5 to 6.
    assert history.computing("a", 1, 1.0, 7.0) == (4.0, 1.5)
    assert history.computing("c", 1, 1.0, 7.0) == (0.0, 5.5)
