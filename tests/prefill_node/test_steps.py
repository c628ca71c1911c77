"""The order of what follows launched steps."""

from __future__ import annotations

import threading

import pytest

from prefill_node.steps import Afterwards


def test_on_the_cpu_everything_follows_at_once() -> None:
    done: list[int] = []
    afterwards = Afterwards(threaded=False)
    afterwards.run(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        afterwards.run(lambda: print(1 // 0))  # noqa: T201 - never printed
    afterwards.close()


def test_on_a_thread_the_order_is_kept_and_launching_goes_on() -> None:
    done: list[int] = []
    afterwards = Afterwards(threaded=True)
    computed = threading.Event()

    def finish() -> None:
        computed.wait()
        done.append(0)

    afterwards.run(finish)
    for number in range(1, 50):
        afterwards.run(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    computed.set()
    afterwards.close()
    assert done == list(range(50))


def test_after_an_error_nothing_follows_and_it_is_raised() -> None:
    done: list[int] = []
    afterwards = Afterwards(threaded=True)
    afterwards.run(lambda: print(1 // 0))  # noqa: T201 - never printed
    with pytest.raises(ZeroDivisionError):
        while True:
            afterwards.run(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        afterwards.close()
    assert done == []
