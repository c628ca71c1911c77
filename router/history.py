"""What became of the requests that this router runs, or has run lately: for the page, so that people can look at it.

Pure, and bounded whatever the number and the length of requests. Nothing of what prompts and answers say is kept. All
times are seconds of the clock that `History` is given.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

from headwater.errors import HeadwaterError
from headwater.lifecycle import Event
from headwater.v1 import router_pb2

# Requests that have ended and are still remembered.
_REMEMBERED = 200
# Of one error's message.
_LONGEST_DETAIL = 500
ENDS = frozenset({Event.FINISHED, Event.CANCELLED, Event.FAILED})


@dataclasses.dataclass(frozen=True, slots=True)
class Leg:
    """A prefill group that was asked, and the id by which it knows the request."""

    prefill: str
    request_id: str


class Record:
    """One request. The flow calls each method when it learns of it.

    Attributes:
        number: of this router, in the order of their coming; request ids may come again.
        events: what happened, and when; never empty.
        legs: in order; more than one when groups were lost.
        outcome: a finish reason, "cancelled", or the class of the error.
        detail: the error's message.
    """

    def __init__(self, number: int, request_id: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.number = number
        self.request_id = request_id
        self.events: list[tuple[Event, float]] = [(Event.RECEIVED, clock())]
        self.num_prompt_tokens = 0
        self.num_tokens_done = 0
        self.num_generated_tokens = 0
        self.prefill = ""
        self.decode = ""
        self.legs: list[Leg] = []
        self.ttft: router_pb2.TtftParts | None = None
        self.outcome = ""
        self.detail = ""

    @property
    def received(self) -> float:
        return self.events[0][1]

    @property
    def event(self) -> Event:
        """The newest."""
        return self.events[-1][0]

    @property
    def ended(self) -> bool:
        return self.event in ENDS

    def _note(self, event: Event) -> None:
        self.events.append((event, self._clock()))

    def tokenized(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._note(Event.TOKENIZED)

    def paired(self, prefill: str, decode: str) -> None:
        """A pair is chosen, once more when the request is started anew. `decode` is empty when no KV will move."""
        self.prefill, self.decode = prefill, decode
        self.num_tokens_done = 0
        self._note(Event.PAIRED)

    def prefilling(self, prefill: str, request_id: str) -> None:
        """A prefill group is asked: the pair's, whose decode group has granted, or another one instead of it."""
        self.prefill = prefill
        self.legs.append(Leg(prefill, request_id))
        self._note(Event.ADMITTED if self.event is Event.PAIRED else Event.RESUMED)

    def redirected(self, decode: str) -> None:
        """The KV goes to another decode group."""
        self.decode = decode
        self._note(Event.REDIRECTED)

    def progress(self, num_tokens_done: int) -> None:
        """The last stage has computed the prompt up to there."""
        self.num_tokens_done = num_tokens_done

    def first_token(self, ttft: router_pb2.TtftParts) -> None:
        """It was handed to the client's stream."""
        self.ttft = ttft
        self._note(Event.FIRST_TOKEN_SENT)

    def committed(self) -> None:
        self._note(Event.COMMITTED)

    def finished(self, outcome: str) -> None:
        self.outcome = outcome
        self._note(Event.FINISHED)

    def cancelled(self) -> None:
        self.outcome = "cancelled"
        self._note(Event.CANCELLED)

    def failed(self, error: BaseException) -> None:
        self.outcome = type(error).__name__
        # What is no HeadwaterError is a defect, and may say anything.
        self.detail = str(error)[:_LONGEST_DETAIL] if isinstance(error, HeadwaterError) else ""
        self._note(Event.FAILED)


class History:
    """Every request that runs, and the last ones that have ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, remembered: int = _REMEMBERED) -> None:
        self._clock = clock
        self._num_received = 0
        self._running: dict[int, Record] = {}
        self._ended: collections.deque[Record] = collections.deque(maxlen=remembered)

    def now(self) -> float:
        """On the clock of the records."""
        return self._clock()

    @contextlib.contextmanager
    def follow(self, request_id: str) -> Iterator[Record]:
        """Keeps a record of what runs in the context. What that raises is how the request ended, unless its answer was
        complete before.
        """
        self._num_received += 1
        record = self._running[self._num_received] = Record(self._num_received, request_id, self._clock)
        try:
            yield record
        except asyncio.CancelledError:
            if not record.ended:
                record.cancelled()
            raise
        except BaseException as error:
            if not record.ended:
                record.failed(error)
            raise
        finally:
            self._ended.appendleft(self._running.pop(record.number))

    def running(self) -> list[Record]:
        """The newest first."""
        return list(self._running.values())[::-1]

    def ended(self) -> list[Record]:
        """The one that ended last comes first."""
        return list(self._ended)

    def find(self, request_id: str) -> Record | None:
        """The newest one with that id."""
        found = (record for record in [*self._running.values(), *self._ended] if record.request_id == request_id)
        return max(found, key=lambda record: record.number, default=None)
