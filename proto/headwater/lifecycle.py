"""Lifecycle events and structured logs.

One enum of events feeds logs and metrics. Every process writes JSON lines to standard error: `time` is Unix
seconds for people; `monotonic` is the host's CLOCK_MONOTONIC in seconds, the same for all processes of one
host, so events of different processes on one host can be ordered. `node` and `rank` name the process;
`request` and `transfer` name the work.
"""

from __future__ import annotations

import enum
import json
import logging
import sys
import time
from typing import Any

_FIELDS = "headwater_fields"


class Event(enum.StrEnum):
    """What can happen to a request, in the usual order."""

    RECEIVED = "received"  # router: the request arrived
    TOKENIZED = "tokenized"  # router
    GRANTED = "granted"  # decode: admitted, grant sent
    PAIRED = "paired"  # router: has the grant
    RESUMED = "resumed"  # router: another group goes on where one was lost
    RETRIED = "retried"  # router: starts anew on other groups
    QUEUED = "queued"  # leader: accepted
    SCHEDULED = "scheduled"  # leader: first step sent to the workers
    CHUNK_STARTED = "chunk_started"  # worker: computing [start, end)
    CHUNK_COMPUTED = "chunk_computed"  # worker
    KV_WRITTEN = "kv_written"  # worker: one box is in its landing slot
    RECEIPT = "receipt"  # decode: one box verified and unpacked
    SUSPENDED = "suspended"  # decode: an attempt was lost; what is verified is kept for the next
    FETCHED = "fetched"  # worker: has taken over what earlier attempts verified
    DELIVERY_LOST = "delivery_lost"  # leader: the decode node is gone; pages are kept for a redirect
    REDIRECTED = "redirected"  # leader: the KV goes to another decode node
    FIRST_TOKEN_SAMPLED = "first_token_sampled"  # noqa: S105 - leader knows it
    FIRST_TOKEN_SENT = "first_token_sent"  # noqa: S105 - router: handed to the client's stream
    RELEASED = "released"  # leader: every rank quiesced, pages free
    COMMITTED = "committed"  # decode: full, verified coverage
    FINISHED = "finished"  # router, decode: the answer is complete
    ABORTED = "aborted"  # any: cancelled
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


def configure_logging(node: str, level: str, rank: int | None = None) -> None:
    """Sends every log line of this process to standard error as JSON.

    Args:
        node: the group's or router's name in the cluster file.
        level: "debug", "info", "warning" or "error".
        rank: rank in the prefill group, for workers.
    """
    process: dict[str, Any] = {"node": node} if rank is None else {"node": node, "rank": rank}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
