"""Two real processes over Mooncake TCP: killed and stopped at any moment, and nothing wrong is ever read."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import no_leaks
from tests.kv_transfer.peer import Process

NUM_TOKENS, CHUNK = 2000, 50
PAGES = list(range(125))


@contextlib.contextmanager
def peer(role: str, name: str, **options: Any) -> Iterator[Process]:
    """A peer that is closed in order, unless the test has killed it."""
    process = Process(role, name, **options)
    try:
        yield process
        if process._process.poll() is None:
            process.close()
    finally:
        process.kill()


def begin(prefill: Process, decode: Process, name: str, pages: list[int] | None = None) -> None:
    grant = decode("expect", transfer=name, num_tokens=NUM_TOKENS)
    prefill("open", transfer=name, num_tokens=NUM_TOKENS, grant=grant, pages=pages or PAGES)
    # Before a writer has opened its delivery there is nobody to lose.
    while decode("writers", transfer=name) < 2:
        pass


def send(prefill: Process, name: str, start: int = 0, end: int = NUM_TOKENS) -> None:
    prefill("send", transfer=name, start=start, end=end, chunk=CHUNK)


def until_verified(decode: Process, name: str, tokens: int) -> None:
    while decode("verified", transfer=name) < tokens:
        pass


def until_free(decode: Process) -> dict[str, int]:
    """Waits until every slot is free; that it happens at all is what is asserted."""
    end = time.monotonic() + 30
    while (slots := decode("slots"))["held"] or slots["quarantined"] or slots["open"]:
        assert time.monotonic() < end, slots
    return slots


def all_failures(prefill: Process) -> list[str]:
    """What both ranks were told of, while no one has said that no more chunks come."""
    while len(failures := prefill("failures")) < 2:
        pass
    return failures  # type: ignore[no-any-return]


def deliver(prefill: Process, decode: Process, name: str) -> None:
    """A whole transfer that must be right."""
    begin(prefill, decode, name)
    send(prefill, name)
    prefill("finish", transfer=name)
    assert decode("outcome", transfer=name) == "right"
    assert prefill("ended", transfer=name) == ["", ""]


# How much has been verified when it happens: nothing, some, all but the end.
MOMENTS = {"start": 0, "middle": NUM_TOKENS // 2, "end": NUM_TOKENS}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_sender_is_killed(moment: str) -> None:
    """S05: nothing waits for what never comes."""
    with no_leaks(), peer("decode", "d") as decode:
        with peer("prefill", "p1") as prefill:
            begin(prefill, decode, "t")
            send(prefill, "t", end=MOMENTS[moment])
            if moment == "end":
                until_verified(decode, "t", NUM_TOKENS)
            prefill.kill()
        assert decode("outcome", transfer="t") == "PeerUnavailable"
        until_free(decode)
        # S04: it is not held against the next one.
        with peer("prefill", "p2") as prefill:
            deliver(prefill, decode, "t2")


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_receiver_is_killed(moment: str) -> None:
    """S08: the sender's pages stay pinned while they may be read, and are free afterwards."""
    with no_leaks(), peer("prefill", "p") as prefill:
        with peer("decode", "d1") as decode:
            begin(prefill, decode, "t")
            send(prefill, "t", end=MOMENTS[moment])
            if moment == "end":
                until_verified(decode, "t", NUM_TOKENS)
            decode.kill()
        prefill("finish", transfer="t")
        errors = prefill("ended", transfer="t")
        assert all(error in ("PeerUnavailable", "WriteFailed") for error in errors), errors
        while prefill("held"):
            pass
        with peer("decode", "d2") as decode:
            deliver(prefill, decode, "t2")


@pytest.mark.parametrize("end", ["sender aborts", "receiver aborts", "sender dies", "receiver dies", "finish"])
def test_an_end_reaches_the_other_side_in_under_a_second(end: str) -> None:
    """The transfer is half done and nothing is under way, so that nothing else could carry the news."""
    with no_leaks(), peer("decode", "d") as decode, peer("prefill", "p") as prefill:
        begin(prefill, decode, "t")
        send(prefill, "t", end=NUM_TOKENS // 2)
        until_verified(decode, "t", NUM_TOKENS // 2)
        if end == "finish":
            send(prefill, "t", start=NUM_TOKENS // 2)
            until_verified(decode, "t", NUM_TOKENS)
        asked = time.monotonic()
        if end == "sender aborts":
            prefill("abort", transfer="t")
            assert decode("outcome", transfer="t") == "TransferFailed"
        elif end == "receiver aborts":
            decode("abort", transfer="t")
            assert all_failures(prefill) == ["TransferFailed", "TransferFailed"]
        elif end == "sender dies":
            prefill.kill()
            assert decode("outcome", transfer="t") == "PeerUnavailable"
        elif end == "receiver dies":
            decode.kill()
            assert all_failures(prefill) == ["PeerUnavailable", "PeerUnavailable"]
        else:
            prefill("finish", transfer="t")
            assert decode("outcome", transfer="t") == "right"
        assert time.monotonic() - asked < 1


def test_the_receiver_is_stopped_a_write_times_out_and_lands_late_and_nobody_reads_it() -> None:
    """S01, S06: a write that was reported as failed lands when the receiver goes on."""
    with no_leaks(), peer("decode", "d") as decode, peer("prefill", "p") as prefill:
        begin(prefill, decode, "t")
        send(prefill, "t", end=NUM_TOKENS // 2)
        until_verified(decode, "t", NUM_TOKENS // 2)
        decode.begin("slots")
        decode.end()
        os.kill(decode.pid, signal.SIGSTOP)
        send(prefill, "t", start=NUM_TOKENS // 2)
        prefill("finish", transfer="t")
        # The writes' deadline passes on the sender; its pages are another prompt's from now on.
        prefill.begin("ended", transfer="t")
        errors = prefill.end()
        assert "WriteFailed" in errors, errors
        os.kill(decode.pid, signal.SIGCONT)
        assert decode("outcome", transfer="t") != "right"
        slots = until_free(decode)
        # What the late writes were aimed at is nobody's any more.
        assert slots["retired"] >= 2
        for number in range(3):
            deliver(prefill, decode, f"t{number}")


def test_the_sender_is_stopped_and_goes_on_when_its_slots_are_somebody_elses() -> None:
    """A lease ends a writer that is silent; when it wakes up, its slots have other memory."""
    with no_leaks(), peer("decode", "d", lease_seconds=1.0, stop_seconds=1.0) as decode:
        with peer("prefill", "p1") as stopped, peer("prefill", "p2") as other:
            begin(stopped, decode, "t")
            send(stopped, "t")
            until_verified(decode, "t", CHUNK)
            os.kill(stopped.pid, signal.SIGSTOP)
            assert decode("outcome", transfer="t") == "DeadlinePassed"
            until_free(decode)
            deliver(other, decode, "t2")
            begin(other, decode, "t3")
            os.kill(stopped.pid, signal.SIGCONT)
            send(other, "t3")
            other("finish", transfer="t3")
            assert decode("outcome", transfer="t3") == "right"
            stopped("finish", transfer="t")
            assert all(stopped("ended", transfer="t"))
            other("ended", transfer="t3")


def test_two_hundred_aborts_under_load_with_pages_and_slots_reused_at_once() -> None:
    """S01: aborts from either side at any moment; every answer that survives is right."""
    random.seed(5)
    with no_leaks(), peer("decode", "d", num_slots=6) as decode, peer("prefill", "p", num_pages=300) as prefill:
        right = aborted = number = 0
        while aborted < 200:
            # Two at a time, in the same pages as the two before.
            names = [f"t{number}", f"t{number + 1}"]
            number += 2
            for name, first in zip(names, (0, 140), strict=True):
                begin(prefill, decode, name, pages=list(range(first, first + 125)))
                send(prefill, name)
                prefill("finish", transfer=name)
            time.sleep(random.random() * 0.03)
            victims = [name for name in names if random.random() < 0.7]
            for name in victims:
                (prefill if random.random() < 0.5 else decode)("abort", transfer=name)
            for name in names:
                outcome = decode("outcome", transfer=name)
                errors = prefill("ended", transfer=name)
                right += outcome == "right"
                aborted += outcome != "right"
                assert outcome == "right" or name in victims, (outcome, errors)
        slots = until_free(decode)
        assert slots["free"] == 6
        assert prefill("held") == 0
        assert right > 20
