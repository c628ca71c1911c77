"""Log lines as other programs read them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from headwater.lifecycle import Event, configure_logging, get_logger


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_event_names_process_and_work(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("p0", "info", rank=3)
    log = get_logger("some.module").bind(request="r", transfer="t")
    log.event(Event.RELEASED, num_pages=4)
    log.debug("not shown")
    (line,) = lines(capsys)
    monotonic, seconds = line.pop("monotonic"), line.pop("time")
    assert isinstance(monotonic, float)
    assert isinstance(seconds, float)
    assert line == {
        "level": "info",
        "logger": "some.module",
        "node": "p0",
        "rank": 3,
        "message": "released",
        "request": "r",
        "transfer": "t",
        "event": "released",
        "num_pages": 4,
    }


def test_binding_leaves_the_logger_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "warning")
    log = get_logger("x")
    log.bind(request="r").warning("one", seconds=1.5)
    log.warning("two\nlines", path=object)
    log.info("not shown")
    one, two = lines(capsys)
    assert (one["request"], one["seconds"], "rank" in one) == ("r", 1.5, False)
    assert (two["message"], two["path"], "request" in two) == ("two\nlines", "<class 'object'>", False)


def test_exception_carries_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "error")
    try:
        raise ValueError("boom")  # noqa: TRY301 - the traceback is what is tested
    except ValueError:
        get_logger("x").exception("it failed", request="r")
    (line,) = lines(capsys)
    assert (line["level"], line["message"], line["request"]) == ("error", "it failed", "r")
    assert str(line["traceback"]).endswith("ValueError: boom")


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("p0", "info", rank=3, form="human")
    get_logger("x").bind(request="r", transfer=None).event(Event.CHUNK_STARTED, tokens=[0, 512])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.partition(" ")[2] == "INFO    p0/3 chunk_started  request=r tokens=[0, 512]"
