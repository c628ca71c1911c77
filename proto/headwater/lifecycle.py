"""Lifecycle events and structured logs.

One enum of events feeds logs, spans and metrics: an event is logged, and added to the OpenTelemetry span that is
current, if there is one. Every process writes lines to standard error, as JSON or for people.
In JSON `time` is Unix seconds; `monotonic` is the host's CLOCK_MONOTONIC in seconds, the same for all processes of one
host, so events of different processes on one host can be ordered. `node` and `rank` name the process; `request` and
`transfer` name the work.
"""

from __future__ import annotations

import enum
import json
import logging
import sys
import time
from typing import Any

from opentelemetry import trace

_FIELDS = "headwater_fields"


class Event(enum.StrEnum):
    """What can happen to a request, in the usual order."""

    RECEIVED = "received"  # router: the request arrived
    TOKENIZED = "tokenized"  # router
    PAIRED = "paired"  # router: has chosen a prefill and a decode group
    ADMITTED = "admitted"  # decode: grants
    RESUMED = "resumed"  # router: another group goes on where one was lost
    RETRIED = "retried"  # router: starts anew on other groups
    QUEUED = "queued"  # leader: accepted
    SCHEDULED = "scheduled"  # leader: first step sent to the workers
    CHUNK_STARTED = "chunk_started"  # worker: computing [start, end)
    CHUNK_FINISHED = "chunk_finished"  # worker
    CHUNK_WRITTEN = "chunk_written"  # worker: one box of a chunk's KV is in its landing slot
    CHUNK_LANDED = "chunk_landed"  # decode: one box of a chunk's KV is verified and unpacked
    SUSPENDED = "suspended"  # decode: an attempt was lost; what is verified is kept for the next
    FETCHED = "fetched"  # worker: has taken over what earlier attempts verified
    DELIVERY_LOST = "delivery_lost"  # leader: the decode node is gone; pages are kept for a redirect
    REDIRECTED = "redirected"  # leader: the KV goes to another decode node
    FIRST_TOKEN_SAMPLED = "first_token_sampled"  # noqa: S105 - leader knows it
    FIRST_TOKEN_SENT = "first_token_sent"  # noqa: S105 - router: handed to the client's stream
    RELEASED = "released"  # leader: every rank quiesced, pages free
    COMMITTED = "committed"  # decode: full, verified coverage
    DECODE_STARTED = "decode_started"  # decode: the answer is continued
    FINISHED = "finished"  # router, decode: the answer is complete
    CANCELLED = "cancelled"  # any: nobody wants it any more
    FAILED = "failed"  # any: ended by an error


class Logger:
    """A logger whose calls carry typed fields instead of formatted text."""

    def __init__(self, logger: logging.Logger, fields: dict[str, Any]) -> None:
        self._logger = logger
        self._bound = fields

    def bind(self, **fields: Any) -> Logger:
        """A logger that adds `fields` to every line."""
        return Logger(self._logger, self._bound | fields)

    def event(self, event: Event, **fields: Any) -> None:
        """One lifecycle event."""
        self._emit(logging.INFO, event.value, {"event": event.value} | fields)
        span = trace.get_current_span()
        if span.is_recording():
            known = {f"headwater.{name}": value for name, value in fields.items() if value is not None}
            span.add_event(event.value, known)

    def debug(self, message: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        self._emit(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        self._emit(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Any) -> None:
        self._emit(logging.ERROR, message, fields)

    def exception(self, message: str, **fields: Any) -> None:
        """An error with the traceback of the exception being handled."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._logger.error(message, exc_info=True, extra={_FIELDS: self._bound | fields})  # noqa: LOG014 - our caller handles one

    def _emit(self, level: int, message: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={_FIELDS: self._bound | fields})


def get_logger(name: str) -> Logger:
    """A module's logger; called with `__name__`."""
    return Logger(logging.getLogger(name), {})


class _JsonLines(logging.Formatter):
    def __init__(self, process: dict[str, Any]) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        line = {
            "time": round(record.created, 6),
            "monotonic": round(time.monotonic(), 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _HumanLines(logging.Formatter):
    """`12:34:56.789 INFO  p0/3 chunk_started  request=r1 tokens=[0, 512]`."""

    def __init__(self, process: dict[str, Any]) -> None:
        super().__init__()
        self._process = "/".join(str(part) for part in process.values())

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in getattr(record, _FIELDS, {}).items() if name != "event"}
        time_of_day = f"{self.formatTime(record, '%H:%M:%S')}.{record.msecs:03.0f}"
        said = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        line = f"{time_of_day} {record.levelname:<7} {self._process} {record.getMessage()}  {said}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


_FORMATS = {"json": _JsonLines, "human": _HumanLines}


def configure_logging(node: str, level: str, rank: int | None = None, form: str = "json") -> None:
    """Sends every log line of this process to standard error.

    Args:
        node: the group's or router's name in the cluster file.
        level: "debug", "info", "warning" or "error".
        rank: rank in the prefill group, for workers.
        form: "json" or "human".
    """
    process: dict[str, Any] = {"node": node} if rank is None else {"node": node, "rank": rank}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_FORMATS[form](process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
