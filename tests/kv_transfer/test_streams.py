"""Work that must not be abandoned half done."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.streams import to_its_end


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
