"""Keeps what each group last said of itself, by asking every group once a heartbeat.

Groups are listed in the cluster file, or register by themselves and are forgotten when their lease ends. State is soft:
it is rebuilt from registrations and answers, so a restarted router needs nothing from its predecessor, and several
routers may serve the same groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from headwater.cluster import Cluster
from headwater.errors import CapacityError, GeometryMismatch, HeadwaterError, InvalidConfig, PeerError, PeerUnavailable
from headwater.lifecycle import get_logger
from headwater.v1 import decode_pb2, prefill_pb2
from router import metrics
from router.breaker import Breaker, BreakerState
from router.compatibility import mismatches, unpaired
from router.prefixes import Prefixes
from router.snapshot import Group, Snapshot, State

log = get_logger(__name__)

# A group that registered is forgotten when it has not said so again for so long.
LEASE_SECONDS = 10.0

_Description = TypeVar("_Description", prefill_pb2.DescribePrefillResponse, decode_pb2.DescribeDecodeResponse)


class Describers(Protocol):
    """What the registry needs of `router.peers.Peers`."""

    async def describe_prefill(self, name: str) -> prefill_pb2.DescribePrefillResponse: ...

    async def describe_decode(self, name: str) -> decode_pb2.DescribeDecodeResponse: ...

    def add(self, name: str, role: str, address: str) -> None: ...

    async def remove(self, name: str) -> None: ...


class _Member(Generic[_Description]):
    """One group's changing entry.

    Attributes:
        lease_until: of one that registered; None: it is listed in the cluster file.
    """

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
        self.prefixes = Prefixes()
        self.lease_until: float | None = None
        self.watching: asyncio.Task[None] | None = None
        # When the newest description was asked for.
        self.described_at = 0.0
        # What listeners were last told of: state, description, whether the breaker lets requests through.
        self.told: tuple[State, _Description | None, bool] | None = None
        # When a request last failed here, until listeners were told what the group has said since.
        self.failed_at: float | None = None
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
                # Nothing that an earlier incarnation did counts against this one, and nothing that it had is there.
                self.breaker = Breaker(self._clock)
                self.prefixes = Prefixes()
            self.description, self.described_at = answer, asked_at
        return before != (self.state, self.detail, self.description.epoch if self.description else "")

    def frozen(self, blocks: Sequence[int]) -> Group[_Description]:
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
            self.described_at,
            self.prefixes.cached_tokens(blocks),
        )

    def send(self, num_tokens: int, blocks: Sequence[int]) -> object:
        """Counts a request; returns its key in `sent`."""
        key, said = object(), self.description
        self.sent[key] = num_tokens - self.prefixes.cached_tokens(blocks), self._clock()
        if isinstance(said, prefill_pb2.DescribePrefillResponse) and said.HasField("prefix_cache"):
            self.prefixes.add(blocks, said.capacity_tokens)
        return key


_AnyMember: TypeAlias = _Member[prefill_pb2.DescribePrefillResponse] | _Member[decode_pb2.DescribeDecodeResponse]


class Registry:
    """The groups of a cluster file, and those that have registered.

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
        self._describers = describers
        # In the order of the cluster file; those that registered follow in the order of their coming.
        self._prefill: dict[str, _Member[prefill_pb2.DescribePrefillResponse]] = {}
        self._decode: dict[str, _Member[decode_pb2.DescribeDecodeResponse]] = {}
        for group in cluster.prefill:
            self._add(group.name, "prefill", group.address)
        for node in cluster.decode:
            self._add(node.name, "decode", node.address)
        self._reported: set[str] = set()
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[str], None]) -> None:
        """Has `listener` told the name of a group whenever it may be able to take what it could not before."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Returns when every group has been asked once."""
        await asyncio.gather(*(self._ask(member) for member in self._members()))
        for member in self._members():
            member.watching = asyncio.create_task(self._watch(member))

    async def stop(self) -> None:
        """Asks no more."""
        tasks = [member.watching for member in self._members() if member.watching is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def register(self, name: str, role: str, address: str) -> float:
        """A group says where it is. Returns how long it is remembered, in seconds.

        Raises:
            InvalidConfig: the name is another group's, or there is no such role.
            PeerUnavailable, DeadlinePassed: it cannot be reached there.
            GeometryMismatch: no group of the other role could exchange KV with it, and there are some.
        """
        if role not in ("prefill", "decode"):
            raise InvalidConfig(f'role {role!r} is neither "prefill" nor "decode".')
        member = self._member(name)
        if member is not None and member.address != address:
            if member.lease_until is None or member.state is not State.UNREACHABLE:
                raise InvalidConfig(
                    f"the name {name!r} belongs to a group at {member.address}; give each group a name of its own."
                )
            await self._forget(member)
            member = None
        if member is None:
            member = await self._admit(name, role, address)
        if member.lease_until is not None:
            member.lease_until = self._clock() + LEASE_SECONDS
        return LEASE_SECONDS

    async def _admit(self, name: str, role: str, address: str) -> _AnyMember:
        self._describers.add(name, role, address)
        member = self._add(name, role, address)
        member.lease_until = self._clock() + LEASE_SECONDS
        await self._ask(member)
        try:
            if member.description is None:
                raise PeerUnavailable(f"this router cannot reach {name} at {address}: {member.detail}")
            if reason := unpaired(self.snapshot()).get(name, ""):
                raise GeometryMismatch(reason)
        except PeerError:
            await self._forget(member)
            raise
        member.watching = asyncio.create_task(self._watch(member))
        log.info("group registered", group=name, role=role, address=address)
        return member

    async def _forget(self, member: _AnyMember) -> None:
        role = "prefill" if self._prefill.pop(member.name, None) else "decode"
        self._decode.pop(member.name, None)
        for state in State:
            metrics.GROUP_STATE.remove(member.name, role, state)
        for breaker in BreakerState:
            metrics.BREAKER_STATE.remove(member.name, breaker)
        if member.watching is not None and member.watching is not asyncio.current_task():
            member.watching.cancel()
        await self._describers.remove(member.name)
        self._tell(member.name)

    def _add(self, name: str, role: str, address: str) -> _AnyMember:
        member: _AnyMember
        if role == "prefill":
            member = self._prefill[name] = _Member(name, address, self._describers.describe_prefill, self._clock)
        else:
            member = self._decode[name] = _Member(name, address, self._describers.describe_decode, self._clock)
        for state in State:
            metrics.GROUP_STATE.labels(name, role, state).set_function(lambda state=state: member.state is state)  # type: ignore[misc]
        for breaker in BreakerState:
            metrics.BREAKER_STATE.labels(name, breaker).set_function(
                lambda breaker=breaker: member.breaker.state is breaker  # type: ignore[misc]
            )
        return member

    def _member(self, name: str) -> _AnyMember | None:
        return self._prefill.get(name) or self._decode.get(name)

    def _members(self) -> list[_AnyMember]:
        return [*self._prefill.values(), *self._decode.values()]

    def snapshot(self, blocks: Sequence[int] = ()) -> Snapshot:
        """What is known now, for a prompt with these blocks (`router.prefixes`)."""
        return Snapshot(
            tuple(member.frozen(blocks) for member in self._prefill.values()),
            tuple(member.frozen(()) for member in self._decode.values()),
            self._tokenizer_fingerprint,
        )

    def refresh(self, name: str) -> None:
        """Has the group asked at once. Does not wait for the answer."""
        member = self._member(name)
        if member is not None:
            member.wanted.set()

    def failed(self, name: str, error: HeadwaterError) -> None:
        """A request ended with `error`, which the group raised or is."""
        member = self._member(name)
        if member is not None:
            member.breaker.failed(error)
        if member is not None and isinstance(error, PeerError):
            member.failed_at = self._clock()
            self.refresh(name)

    def succeeded(self, name: str) -> None:
        """The group has done its part of a request."""
        member = self._member(name)
        if member is not None:
            admitted = member.breaker.admits
            member.breaker.succeeded()
            if not admitted:
                self._tell(name)

    @contextlib.contextmanager
    def dispatched(self, name: str, num_tokens: int, blocks: Sequence[int] = ()) -> Iterator[Callable[[], None]]:
        """Counts a request's tokens as the group's load while the context lasts, from before the group reports them.

        Args:
            blocks: of the prompt (`router.prefixes`), for a group that computes it.

        Yields:
            What ends that earlier.

        Raises:
            PeerUnavailable: the group was forgotten since it was chosen.
        """
        member = self._member(name)
        if member is None:
            raise PeerUnavailable(f"{name} has let its lease end.")
        member.breaker.begin()
        sent, key = member.sent, member.send(num_tokens, blocks)
        taken = True
        try:
            yield lambda: sent.pop(key, None) and None
        except CapacityError:
            taken = False
            raise
        finally:
            sent.pop(key, None)
            # What was not taken leaves no more room than there was.
            if taken:
                self._tell(name)

    async def _watch(self, member: _AnyMember) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await member.wanted.wait()
            member.wanted.clear()
            if member.lease_until is None or self._clock() < member.lease_until:
                await self._ask(member)
                continue
            member.state, member.detail = State.NOT_SERVING, "its lease has ended"
            if not member.sent:
                break
        log.warning("a group has let its lease end and is forgotten", group=member.name, address=member.address)
        await self._forget(member)
        await self._on_change(self.snapshot())

    def _tell(self, name: str) -> None:
        for listener in self._listeners:
            listener(name)

    async def _ask(self, member: _AnyMember) -> None:
        changed = await member.ask()
        news = (member.state, member.description, member.breaker.admits)
        # Whoever lost the group wants to know whether it is still there.
        still_there = member.failed_at is not None and member.described_at > member.failed_at
        if still_there:
            member.failed_at = None
        if still_there or news != member.told:
            member.told = news  # type: ignore[assignment] # of the same member
            self._tell(member.name)
        if not changed:
            return
        epoch = member.description.epoch if member.description else ""
        log.info("group changed", group=member.name, state=member.state, detail=member.detail, epoch=epoch)
        snapshot = self.snapshot()
        for reason in mismatches(snapshot).values():
            if reason not in self._reported:
                self._reported.add(reason)
                log.warning("groups cannot be paired", reason=reason)
        await self._on_change(snapshot)
