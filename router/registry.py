"""Keeps what each group last said of itself, by asking every group once a heartbeat.

State is soft: it is rebuilt from the answers, so a restarted router needs nothing from its predecessor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar

from headwater.cluster import Cluster
from headwater.errors import HeadwaterError, PeerError
from headwater.lifecycle import get_logger
from headwater.v1 import decode_pb2, prefill_pb2
from router.breaker import Breaker
from router.compatibility import mismatches
from router.snapshot import Group, Snapshot, State

log = get_logger(__name__)

_Description = TypeVar("_Description", prefill_pb2.DescribePrefillResponse, decode_pb2.DescribeDecodeResponse)


class Describers(Protocol):
    """What the registry needs of `router.peers.Peers`."""

    async def describe_prefill(self, name: str) -> prefill_pb2.DescribePrefillResponse: ...

    async def describe_decode(self, name: str) -> decode_pb2.DescribeDecodeResponse: ...


class _Member(Generic[_Description]):
    """One group's changing entry."""

    def __init__(
        self, name: str, address: str, describe: Callable[[str], Awaitable[_Description]], clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.address = address
        self.state = State.UNREACHABLE
        self.detail = "not asked yet"
        self.description: _Description | None = None
        # Tokens and time of dispatch of what is the group's to do.
        self.sent: dict[object, tuple[int, float]] = {}
        self.breaker = Breaker(clock)
        # When the newest description was asked for.
        self.described_at = 0.0
        self.wanted = asyncio.Event()
        self._describe: Callable[[str], Awaitable[_Description]] = describe
        self._clock = clock

    async def ask(self) -> bool:
        """Asks the group; returns whether its state, reason or epoch changed."""
        before = (self.state, self.detail, self.description.epoch if self.description else "")
        asked_at = self._clock()
        try:
            answer = await self._describe(self.name)
        except HeadwaterError as error:
            self.state, self.detail = State.UNREACHABLE, str(error)
        else:
            self.state = State.SERVING if answer.serving else State.NOT_SERVING
            if answer.draining:
                self.state = State.DRAINING
            self.detail = "" if answer.serving else answer.detail or "it gives no reason"
            if self.description is None or self.description.epoch != answer.epoch:
                # Nothing that an earlier incarnation did counts against this one.
                self.breaker = Breaker(self._clock)
            self.description, self.described_at = answer, asked_at
        return before != (self.state, self.detail, self.description.epoch if self.description else "")

    def frozen(self) -> Group[_Description]:
        return Group(
            self.name,
            self.address,
            self.state,
            self.detail,
            self.description,
            tuple(num_tokens for num_tokens, _ in self.sent.values()),
            tuple(num_tokens for num_tokens, at in self.sent.values() if at >= self.described_at),
            self.breaker.state,
            self.breaker.admits,
        )


_AnyMember: TypeAlias = _Member[prefill_pb2.DescribePrefillResponse] | _Member[decode_pb2.DescribeDecodeResponse]


class Registry:
    """The groups of a cluster file.

    Args:
        on_change: told after a group's state, reason or epoch changed.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cluster: Cluster,
        describers: Describers,
        tokenizer_fingerprint: str,
        on_change: Callable[[Snapshot], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._heartbeat_seconds = cluster.deadlines.heartbeat
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._on_change = on_change
        self._prefill = [_Member(g.name, g.address, describers.describe_prefill, clock) for g in cluster.prefill]
        self._decode = [_Member(g.name, g.address, describers.describe_decode, clock) for g in cluster.decode]
        self._members: dict[str, _AnyMember] = {member.name: member for member in self._prefill}
        self._members |= {member.name: member for member in self._decode}
        self._tasks: list[asyncio.Task[None]] = []
        self._reported: set[str] = set()

    async def start(self) -> None:
        """Returns when every group has been asked once."""
        await asyncio.gather(*(self._ask(member) for member in self._members.values()))
        self._tasks = [asyncio.create_task(self._watch(member)) for member in self._members.values()]

    async def stop(self) -> None:
        """Asks no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def snapshot(self) -> Snapshot:
        """What is known now."""
        return Snapshot(
            tuple(member.frozen() for member in self._prefill),
            tuple(member.frozen() for member in self._decode),
            self._tokenizer_fingerprint,
        )

    def refresh(self, name: str) -> None:
        """Has the group asked at once. Does not wait for the answer."""
        self._members[name].wanted.set()

    def failed(self, name: str, error: HeadwaterError) -> None:
        """A request ended with `error`, which the group raised or is."""
        self._members[name].breaker.failed(error)
        if isinstance(error, PeerError):
            self.refresh(name)

    def succeeded(self, name: str) -> None:
        """The group has done its part of a request."""
        self._members[name].breaker.succeeded()

    @contextlib.contextmanager
    def dispatched(self, name: str, num_tokens: int) -> Iterator[Callable[[], None]]:
        """Counts a request's tokens as the group's load while the context lasts, from before the group reports them.

        Yields:
            What ends that earlier.
        """
        self._members[name].breaker.begin()
        sent, key = self._members[name].sent, object()
        sent[key] = num_tokens, self._clock()
        try:
            yield lambda: sent.pop(key, None) and None
        finally:
            sent.pop(key, None)

    async def _watch(self, member: _AnyMember) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await member.wanted.wait()
            member.wanted.clear()
            await self._ask(member)

    async def _ask(self, member: _AnyMember) -> None:
        if not await member.ask():
            return
        epoch = member.description.epoch if member.description else ""
        log.info("group changed", group=member.name, state=member.state, detail=member.detail, epoch=epoch)
        snapshot = self.snapshot()
        for reason in mismatches(snapshot).values():
            if reason not in self._reported:
                self._reported.add(reason)
                log.warning("groups cannot be paired", reason=reason)
        await self._on_change(snapshot)
