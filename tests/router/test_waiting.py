"""Requests that wait in the router for groups: real gRPC, groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import pytest
from prometheus_client import REGISTRY

from headwater.errors import (
    CapacityError,
    GeometryMismatch,
    InvalidRequest,
    PeerUnavailable,
    RequestCancelled,
)
from headwater.v1 import decode_pb2, prefill_pb2, router_pb2
from router.peers import Peers
from router.snapshot import State
from tests.router.fakes import PATIENCE_SECONDS, FakeDecode, FakePrefill, Site, kinds, site, text_request

ANSWER = [70, 80, 90, 100]


def waiting() -> float:
    return REGISTRY.get_sample_value("headwater_requests_waiting") or 0.0


async def until(holds: Callable[[], bool]) -> None:
    """Returns when `holds`; the sites' patience ends it."""
    while not holds():
        await asyncio.sleep(0.001)


def tokens(responses: list[router_pb2.GenerateResponse]) -> list[int]:
    return [response.token.id for response in responses if response.HasField("token")]


def named(request_id: str, max_tokens: int = 4) -> router_pb2.GenerateRequest:
    request = text_request(max_tokens=max_tokens)
    request.request_id = request_id
    return request


class Places:
    """Gives a fake decode group so many places, and refuses beyond; requests leave them when they are let go."""

    def __init__(self, group: FakeDecode, num_places: int) -> None:
        self.let_go = asyncio.Semaphore(0)
        # In the order in which they got a place; and how often one was refused.
        self.had: list[str] = []
        self.num_refused = 0
        self._group = group
        self._free = num_places
        group.script = self._script

    async def _script(self, request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        if not self._free:
            self.num_refused += 1
            raise CapacityError("d0 is full")
        self._free -= 1
        self.had.append(request.request_id.partition("~")[0])
        try:
            yield FakeDecode.grant(request)
            await self._group.prefill.delivered.wait()
            await self.let_go.acquire()
            for response in self._group.after_commit():
                yield response
        finally:
            self._free += 1


def stops_serving(group: FakePrefill | FakeDecode, detail: str = "") -> None:
    group.description.serving, group.description.detail = not detail, detail


async def seen(it: Site, name: str, state: State) -> None:
    """Returns when the router knows."""
    while {group.name: group.state for group in (await it.client.status()).groups}[name] != state:
        await asyncio.sleep(0.001)


def test_s23_a_full_group_is_waited_for_in_order_of_coming() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, pair_seconds=PATIENCE_SECONDS) as it:
            places = Places(it.decode[0], 2)
            answers = []
            for number in range(6):
                answers.append(asyncio.ensure_future(it.answer(named(f"r{number}"))))
                count = number + 1
                await until(lambda count=count: len(places.had) + waiting() == count)  # type: ignore[misc]
            assert places.had == ["r0", "r1"]
            assert waiting() == 4
            for _ in answers:
                places.let_go.release()
            for answer in answers:
                assert tokens(await answer) == ANSWER
            assert places.had == [f"r{number}" for number in range(6)]
            assert waiting() == 0

    asyncio.run(run())


def test_a_full_queue_refuses_with_a_hint() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, "max_waiting = 1", pair_seconds=PATIENCE_SECONDS) as it:
            places = Places(it.decode[0], 1)
            first = asyncio.ensure_future(it.answer(text_request()))
            await until(lambda: len(places.had) == 1)
            second = asyncio.ensure_future(it.answer(text_request()))
            await until(lambda: waiting() == 1)
            with pytest.raises(CapacityError, match=r"1 requests wait for groups .* \(max_waiting\)") as refused:
                await it.answer(text_request())
            assert refused.value.retry_after_seconds == 1.0
            # Whoever wants no decode group does not stand behind those that do.
            assert tokens(await it.answer(text_request(max_tokens=1))) == ANSWER[:1]
            places.let_go.release()
            places.let_go.release()
            assert tokens(await first) == tokens(await second) == ANSWER

    asyncio.run(run())


def test_when_the_time_is_up_the_reason_is_told() -> None:
    async def run() -> None:
        async with site(ANSWER, 1) as it:
            places = Places(it.decode[0], 0)
            with pytest.raises(CapacityError, match=r"d0 is full \(.* waited for deadlines.pair = 0.1 s"):
                await it.answer(text_request())
            # It was not asked again and again without news of it.
            assert places.num_refused == 1
            stops_serving(it.prefill[0], "loading weights")
            await seen(it, "p0", State.NOT_SERVING)
            with pytest.raises(PeerUnavailable, match=r"loading weights \(.* waited for deadlines.pair = 0.1 s"):
                await it.answer(text_request())
            assert waiting() == 0

    asyncio.run(run())


def test_a_group_that_restarts_is_waited_for() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, pair_seconds=PATIENCE_SECONDS) as it:
            (group,) = it.prefill
            stops_serving(group, "loading weights")
            await seen(it, "p0", State.NOT_SERVING)
            answering = asyncio.ensure_future(it.answer(text_request()))
            await until(lambda: waiting() == 1)
            stops_serving(group)
            assert tokens(await answering) == ANSWER

    asyncio.run(run())


def test_a_request_goes_to_the_next_incarnation_of_the_group_that_it_lost() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, pair_seconds=PATIENCE_SECONDS) as it:
            (group,) = it.prefill

            async def dies(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                stops_serving(group, "restarting")
                raise PeerUnavailable("p0 lost a worker")
                yield prefill_pb2.PrefillResponse()

            group.script = dies
            answering = asyncio.ensure_future(it.answer(text_request()))
            await until(lambda: waiting() == 1)
            group.script, group.description.epoch = group.run, "second"
            stops_serving(group)
            responses = await answering
            assert tokens(responses) == ANSWER
            assert kinds(responses).count("accepted") == 2

    asyncio.run(run())


def test_an_incarnation_that_failed_a_request_and_serves_on_is_not_waited_for() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, pair_seconds=PATIENCE_SECONDS) as it:

            async def fails(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                raise PeerUnavailable("p0 does not do it")
                yield prefill_pb2.PrefillResponse()

            it.prefill[0].script = fails
            with pytest.raises(PeerUnavailable, match="^p0 does not do it$"):
                await it.answer(text_request())
            assert len(it.prefill[0].requests) == 1

    asyncio.run(run())


def test_what_no_known_group_could_ever_take_does_not_wait() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, pair_seconds=PATIENCE_SECONDS) as it:
            it.decode[0].description.capacity_tokens = it.decode[0].description.free_tokens = 8
            stops_serving(it.decode[0], "loading weights")
            await seen(it, "d0", State.NOT_SERVING)
            with pytest.raises(InvalidRequest, match="the largest decode pool"):
                await it.answer(text_request())
            it.decode[0].description.capacity_tokens = 1024
            it.decode[0].description.geometry.key_size = 16
            stops_serving(it.decode[0])
            await seen(it, "d0", State.SERVING)
            with pytest.raises(GeometryMismatch, match="key_size"):
                await it.answer(text_request())

    asyncio.run(run())


def test_s20_cancel_and_a_client_that_leaves_give_up_the_place_at_once() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, pair_seconds=PATIENCE_SECONDS) as it:
            places = Places(it.decode[0], 1)
            first = asyncio.ensure_future(it.answer(text_request()))
            await until(lambda: len(places.had) == 1)
            leaving = asyncio.ensure_future(it.answer(text_request()))
            await until(lambda: waiting() == 1)
            cancelled = asyncio.ensure_future(it.answer(named("cancelled")))
            await until(lambda: waiting() == 2)
            leaving.cancel()
            await until(lambda: waiting() == 1)
            await it.client.cancel("cancelled")
            await until(lambda: waiting() == 0)
            with pytest.raises(RequestCancelled, match="cancelled at the router"):
                await cancelled
            with pytest.raises(asyncio.CancelledError):
                await leaving
            places.let_go.release()
            assert tokens(await first) == ANSWER
            assert len(places.had) == 1

    asyncio.run(run())


def test_s20_a_cancel_in_the_moment_of_a_refusal_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    flows: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def refuse(_: Peers, name: str, request: decode_pb2.DecodeRequest) -> AsyncGenerator[None, None]:
        flows.extend(task for task in asyncio.all_tasks() if "Flow.run" in repr(task.get_coro()))
        flows[0].cancel()
        raise CapacityError("d0 is full")
        yield

    async def run() -> None:
        async with site(ANSWER, 1, pair_seconds=PATIENCE_SECONDS) as it:
            monkeypatch.setattr(Peers, "decode", refuse)
            asking = asyncio.ensure_future(it.answer(text_request()))
            await until(lambda: len(flows) > 0 and flows[0].done())
            assert (len(flows), flows[0].cancelled(), waiting()) == (1, True, 0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(run())


def test_with_no_places_nothing_waits() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, "max_waiting = 0", pair_seconds=PATIENCE_SECONDS) as it:
            Places(it.decode[0], 0)
            with pytest.raises(CapacityError, match="^d0 is full$"):
                await it.answer(text_request())

    asyncio.run(run())


def test_a_group_whose_breaker_is_open_is_waited_for_and_tried_when_time_is_up() -> None:
    async def run() -> None:
        async with site(ANSWER, 1, pair_seconds=0.1) as it:
            (group,) = it.prefill

            async def gone(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                raise PeerUnavailable("p0 is gone")
                yield prefill_pb2.PrefillResponse()

            group.script = gone
            for _ in range(3):
                with pytest.raises(PeerUnavailable, match="p0 is gone"):
                    await it.answer(text_request())
            assert (await it.client.status()).groups[0].breaker == "open"
            group.script = group.run
            answering = asyncio.ensure_future(it.answer(text_request()))
            await until(lambda: waiting() == 1)
            assert len(group.requests) == 3
            assert tokens(await answering) == ANSWER

    asyncio.run(run())
