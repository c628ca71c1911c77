"""The page as people see it: real Chromium, real router, groups whose chunks come when the test says so."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeVar

import pytest

from headwater.cluster import parse_cluster
from headwater.v1 import prefill_pb2, router_pb2
from router.server import running_router
from tests.browser.chrome import NoBrowserError, Page, installed, open_page
from tests.router.fakes import CHUNK_TOKENS, FakeDecode, FakePrefill, rig, text_request, tiny_model

_Result = TypeVar("_Result")

ANSWER = [70, 80, 90]
# Ids come from clients.
REQUEST_ID = "<b>of a client</b>/1"
NUM_STAGES = 2
PROMPT_TOKENS, NUM_CHUNKS = 12, 3


@pytest.fixture(scope="module")
def browser() -> tuple[str, str]:
    try:
        return installed()
    except NoBrowserError as error:
        pytest.skip(str(error))


@pytest.fixture
def page(browser: tuple[str, str]) -> Iterator[Page]:
    with open_page(*browser) as opened:
        yield opened


async def seen(look: Callable[..., _Result], *arguments: object) -> _Result:
    """What a blocking look at the page gives, while the router goes on."""
    return await asyncio.to_thread(functools.partial(look, *arguments))


@dataclasses.dataclass
class SlowPrefill:
    """The script of a group that computes a chunk each time it is told to, and remembers that."""

    group: FakePrefill
    chunks: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(0))

    def trace(self, request_id: str) -> prefill_pb2.TracePrefillResponse:
        new = prefill_pb2.TracePrefillResponse(num_stages=NUM_STAGES)
        return self.group.traces.setdefault(request_id, new)

    async def script(self, request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        trace, done = self.trace(request.request_id), 0
        async for response in self.group.until_first_token(request):
            if response.HasField("chunk_done") or response.HasField("first_token"):
                await self.chunks.acquire()
                self.remember(trace, request.request_id, done)
                done += 1
            yield response
        self.group.delivered.set()
        yield prefill_pb2.PrefillResponse(completed=prefill_pb2.PrefillCompleted())

    @staticmethod
    def remember(trace: prefill_pb2.TracePrefillResponse, request_id: str, chunk: int) -> None:
        tokens = {"token_start": chunk * CHUNK_TOKENS, "token_end": (chunk + 1) * CHUNK_TOKENS}
        for stage in range(NUM_STAGES):
            start = chunk + stage
            trace.stages.add(stage=stage, start=start, end=start + 0.9, request_id=request_id, **tokens)
            trace.transfers.add(rank=stage, start=start + 0.9, end=start + 1.4, num_bytes=4096, **tokens)


def describe(prefill: FakePrefill, decode: FakeDecode) -> None:
    prefill.description.layer_boundaries.extend([0, 1, 2])
    prefill.description.free_tokens = 1000
    decode.description.slots_free, decode.description.slots_held = 60, 4


async def a_request_is_followed(page: Page) -> None:
    async with rig(ANSWER, prepare=describe) as it:
        slow = SlowPrefill(it.prefill)
        it.prefill.script = slow.script
        await seen(page.set_screen, 1280, 900)
        url = f"http://{(await it.client.status()).page_address}/"
        await seen(page.driver.get, url)
        # Nothing was asked yet: groups, and what to do.
        await seen(page.until_text, "#link", "live")
        assert await seen(page.texts, ".group .name") == ["p0", "d0"]
        assert await seen(page.texts, ".group .state") == ["● serving", "● serving"]
        assert await seen(page.texts, ".stage") == ["layers 0–0", "layers 1–1"]
        gauges = await seen(page.text, ".group .gauges")
        assert "24 / 1,024" in gauges
        assert "6 of 256 held" in await seen(page.text, ".group .rows")
        assert "4 / 64" in (await seen(page.texts, ".group .gauges"))[1]
        assert await seen(page.all("#requests-empty")[0].is_displayed)
        # A request, chunk by chunk.
        request = router_pb2.GenerateRequest(max_tokens=3, request_id=REQUEST_ID)
        request.token_ids.ids.extend(range(1, PROMPT_TOKENS + 1))
        answering = asyncio.ensure_future(it.answer(request))
        await seen(page.until_text, "#requests .phase", "prefill")
        assert await seen(page.texts, "#requests .id") == [REQUEST_ID]
        for chunk in range(1, NUM_CHUNKS):
            slow.chunks.release()
            tokens = chunk * CHUNK_TOKENS
            progress = f"{tokens} of {PROMPT_TOKENS} tokens"
            await seen(page.until, lambda t=progress: page.all("#requests td")[3].get_property("title") == t, progress)
            await seen(
                page.until, lambda n=chunk: len(page.all(".trace rect.own")) == n * NUM_STAGES, f"{chunk} chunks"
            )
        # The last chunk, and the answer.
        slow.chunks.release()
        await answering
        await seen(page.until_text, "#requests .phase", "finished")
        await seen(page.until, lambda: len(page.all(".trace rect.own")) == NUM_CHUNKS * NUM_STAGES, "all chunks")
        assert len(await seen(page.all, ".trace rect.transfer")) == NUM_CHUNKS * NUM_STAGES
        assert await seen(page.texts, ".trace .row") == ["stage 0", "stage 1", "KV rank 0", "KV rank 1"]
        numbers = await seen(page.texts, ".numbers tbody td")
        assert numbers == ["0", "3", "2.70 s", "6.9 %", "1", "3", "2.70 s", "30.8 %"]
        assert "6 boxes of KV, 24.6 kB" in await seen(page.text, ".numbers p")
        events = await seen(page.texts, "#events b")
        assert events[:4] + events[6:] == ["received", "tokenized", "paired", "admitted", "finished"]
        assert sorted(events[4:6]) == ["committed", "first token sent"]
        assert await seen(page.texts, "#ttft-parts td:first-child") == [
            "routing",
            "admission",
            "retry",
            "queue",
            "exposed transfer",
            "compute",
            "bubble",
            "relay",
        ]
        # Another one is followed of itself, until somebody chooses.
        slow.chunks.release()
        slow.chunks.release()
        second = text_request("the quick", max_tokens=3)
        second.request_id = "second"
        await it.answer(second)
        await seen(page.until_text, "#detail-note", "second")
        await seen(page.all("#requests button")[1].click)
        await seen(page.until_text, "#detail-note", REQUEST_ID)
        await seen(page.until, lambda: len(page.all(".trace rect.own")) == NUM_CHUNKS * NUM_STAGES, "its timeline")
        # On a phone, and in the dark.
        await seen(page.set_screen, 1280, 900)
        light = await seen(page.script, "return getComputedStyle(document.body).backgroundColor")
        await seen(functools.partial(page.set_screen, 360, 740, dark=True))
        assert await seen(page.script, "return getComputedStyle(document.body).backgroundColor") != light
        assert not await seen(page.is_wider_than_its_screen)
        assert await seen(page.complaints) == []
    # The router is gone, and the page says so.
    await seen(page.until_text, "#lost", "does not answer")
    assert await seen(page.text, "#link") == "no connection"
    # Another one takes its place, without groups.
    address = url.removeprefix("http://").rstrip("/")
    file = f'[model]\npath = "m"\n[router]\naddress = "127.0.0.1:0"\npage_address = "{address}"\n'
    async with running_router(parse_cluster(file), tiny_model()):
        await seen(page.until_text, "#link", "live")
        assert not await seen(page.all("#lost")[0].is_displayed)
        await seen(page.until, page.all("#groups-empty")[0].is_displayed, "what to do without groups")


def test_a_request_is_followed_chunk_by_chunk(page: Page) -> None:
    asyncio.run(asyncio.wait_for(a_request_is_followed(page), 120))
