"""Work that must not be abandoned half done."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from headwater.errors import ERROR_CLASS_KEY, CapacityError
from kv_transfer.streams import end_of_saying, say, to_its_end


def test_work_ends_however_often_its_waiter_is_cancelled() -> None:
    async def run() -> None:
        work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(to_its_end(work))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        work.set_result(7)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert work.result() == 7

    asyncio.run(run())


def test_results_and_errors_pass() -> None:
    async def run() -> None:
        work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        work.set_result(7)
        assert await to_its_end(work) == 7
        failing: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        failing.set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await to_its_end(failing)

    asyncio.run(run())


class OverCall:
    """A call that the other side has ended with an error."""

    async def done_writing(self) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")

    async def write(self, message: object) -> None:
        raise asyncio.InvalidStateError("RPC already finished.")

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.ABORTED

    async def details(self) -> str:
        return "d0 is full"

    async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((ERROR_CLASS_KEY, "CapacityError"),)


def test_a_call_that_is_over_tells_its_own_reason() -> None:
    async def run() -> None:
        with pytest.raises(CapacityError, match="d0 is full"):
            await end_of_saying(OverCall(), "d0")
        with pytest.raises(CapacityError, match="d0 is full"):
            await say(OverCall(), object(), "d0")

    asyncio.run(run())
