"""Writes to many peers at once, on top of an engine's bare submit and poll.

Each peer has a lane: a thread that makes first contact, keeps a bounded number of bytes in flight, and polls.
So a peer that hangs holds up nobody but those who write to it, and no caller ever blocks or polls. Every write
has its own result and its own deadline; a write that missed its deadline goes on being watched until the
engine has let go of its source.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from headwater.errors import HeadwaterError
from headwater.lifecycle import get_logger
from kv_transfer import metrics
from kv_transfer.engine import TransferEngine, WriteFailed, WriteState

log = get_logger(__name__)

# How long a lane sleeps between two looks at its oldest write, and the most, which is also how often it looks at all.
_FIRST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 50e-6, 2e-3
# How long closing waits for a lane.
_CLOSE_SECONDS = 5.0
# A lane without work ends after this long.
_IDLE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One contiguous write."""

    source: int
    destination: int
    num_bytes: int


@dataclasses.dataclass(slots=True)
class Written:
    """What has become of the entries of one job.

    Attributes:
        states: one per entry, in order; PENDING is a write that missed its deadline.
    """

    states: list[WriteState]

    @property
    def done(self) -> bool:
        return all(state is WriteState.DONE for state in self.states)


class Job:
    """Entries that were handed to a lane together.

    Attributes:
        result: set at the deadline at the latest; or an exception, when the peer could not be contacted and
            nothing was begun; or cancelled.
        settled: set when the engine reads none of the sources any more; its value is whether all bytes are
            known to be at their destination, or known never to have left.
    """

    def __init__(self, session: str, epoch: str, entries: Sequence[Entry]) -> None:
        self.session = session
        self.epoch = epoch
        self.entries = list(entries)
        self.result: Future[Written] = Future()
        self.settled: Future[bool] = Future()
        # Whoever waits for it may be cancelled; it may not.
        self.settled.set_running_or_notify_cancel()
        self.states = [WriteState.PENDING] * len(self.entries)
        self.started_at = 0.0

    def cancel(self) -> None:
        """Keeps a job that has not begun from beginning; has no effect on another."""
        if self.result.cancel() and not self.settled.done():
            self.settled.set_result(True)


class Writer:
    """Lanes over one engine.

    Args:
        write_seconds: after this long an entry is reported as not done.
        max_bytes_in_flight: per peer; a single entry may be larger.
    """

    def __init__(self, engine: TransferEngine, *, write_seconds: float, max_bytes_in_flight: int) -> None:
        self.engine = engine
        self.write_seconds = write_seconds
        self.max_bytes_in_flight = max_bytes_in_flight
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._closed = False

    def write(self, session: str, epoch: str, entries: Sequence[Entry]) -> Job:
        """Hands entries to the peer's lane. Returns at once; from any thread.

        Args:
            session, epoch: of the peer's engine.
        """
        job = Job(session, epoch, entries)
        with self._lock:
            if self._closed:
                raise WriteFailed("the transfer engine is shutting down.")
            lane = self._lanes.get(session)
            if lane is None:
                lane = self._lanes[session] = _Lane(self, session)
            lane.put(job)
        return job

    def close(self) -> None:
        """Ends the lanes. Jobs that have not begun are cancelled; writes that are late are left to the engine."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()

    def retire(self, lane: _Lane) -> bool:
        """A lane has been idle for long. True when it may end."""
        with self._lock:
            if lane.has_work:
                return False
            del self._lanes[lane.session]
            return True


@dataclasses.dataclass(slots=True)
class _Flight:
    job: Job
    index: int
    handle: int
    late: bool = False


class _Lane:
    """One peer's thread."""

    def __init__(self, writer: Writer, session: str) -> None:
        self.session = session
        self._writer = writer
        self._engine = writer.engine
        self._queue: collections.deque[Job] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._flights: list[_Flight] = []
        self._bytes = 0
        self._look_at_all_at = 0.0
        # Entries of the running job that have not been submitted.
        self._rest: collections.deque[tuple[Job, int]] = collections.deque()
        self._thread = threading.Thread(target=self._run, name=f"kv-lane-{session}", daemon=True)
        self._thread.start()

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._rest or self._flights)

    def put(self, job: Job) -> None:
        with self._changed:
            self._queue.append(job)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        # One that waits for the engine, which bounds it, ends with the process.
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        sleep = _FIRST_SLEEP_SECONDS
        while True:
            with self._changed:
                if not self.has_work and not self._closing:
                    self._changed.wait(_IDLE_SECONDS)
                closing, job = self._closing, None
                if self._queue and not self._rest and self._bytes < self._writer.max_bytes_in_flight:
                    job = self._queue.popleft()
            if closing and all(flight.late for flight in self._flights) and not self._rest:
                for waiting in [job, *self._queue]:
                    if waiting is not None:
                        waiting.cancel()
                return
            if job is not None:
                self._begin(job)
            elif not self.has_work and self._writer.retire(self):
                return
            progressed = self._submit() | self._poll()
            if progressed or job is not None or not self._flights:
                sleep = _FIRST_SLEEP_SECONDS
            else:
                time.sleep(sleep)
                sleep = min(2 * sleep, _LONGEST_SLEEP_SECONDS)

    def _begin(self, job: Job) -> None:
        error: HeadwaterError | None = None
        try:
            # Nothing has begun yet, so the job can still be cancelled meanwhile.
            self._engine.contact(job.session, job.epoch)
        except HeadwaterError as raised:
            error = raised
        if self._closing:
            job.cancel()
        if not job.result.set_running_or_notify_cancel():
            return
        if error is not None:
            job.result.set_exception(error)
            job.settled.set_result(True)
            return
        job.started_at = time.monotonic()
        self._rest.extend((job, index) for index in range(len(job.entries)))

    def _submit(self) -> bool:
        """Begins what may be begun."""
        began = False
        while self._rest and (self._bytes < self._writer.max_bytes_in_flight or not self._flights):
            job, index = self._rest.popleft()
            entry = job.entries[index]
            began = True
            if time.monotonic() - job.started_at > self._writer.write_seconds:
                # Whatever held up the others would hold up this one too.
                self._ended(job, index, WriteState.REFUSED)
                continue
            try:
                handle = self._engine.submit(job.session, entry.source, entry.destination, entry.num_bytes)
            except WriteFailed as error:
                log.warning("a write could not begin", peer=self.session, error=str(error))
                self._ended(job, index, WriteState.REFUSED)
                continue
            self._bytes += entry.num_bytes
            self._flights.append(_Flight(job, index, handle))
        return began

    def _poll(self) -> bool:
        """Looks at the writes in flight, from the oldest to one that is pending; now and then at all of them."""
        now = time.monotonic()
        everything = now >= self._look_at_all_at
        if everything:
            self._look_at_all_at = now + _LONGEST_SLEEP_SECONDS
        progressed = False
        for flight in list(self._flights):
            state = self._engine.poll(flight.handle)
            job, entry = flight.job, flight.job.entries[flight.index]
            if state is WriteState.PENDING and not everything and not flight.late:
                break
            if state is not WriteState.PENDING:
                progressed = True
                self._flights.remove(flight)
                if not flight.late:
                    self._bytes -= entry.num_bytes
                self._ended(job, flight.index, state)
            elif not flight.late and now - job.started_at > self._writer.write_seconds:
                # It no longer counts as in flight: the peer gets no more room by hanging, and loses none.
                flight.late = True
                self._bytes -= entry.num_bytes
                self._report(job)
        return progressed

    def _ended(self, job: Job, index: int, state: WriteState) -> None:
        job.states[index] = state
        if WriteState.PENDING in job.states:
            return
        job.settled.set_result(WriteState.FAILED not in job.states)
        self._report(job)

    def _report(self, job: Job) -> None:
        if not job.result.done():
            metrics.WRITE_SECONDS.observe(time.monotonic() - job.started_at)
            job.result.set_result(Written(list(job.states)))
