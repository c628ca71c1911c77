"""The router's HTTP page, over real HTTP and groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from headwater import security
from headwater.cluster import parse_cluster
from headwater.errors import HeadwaterError, InvalidConfig
from headwater.security import Credentials
from headwater.v1 import common_pb2, prefill_pb2
from router.main import main
from router.page.server import PageServer
from router.server import running_router
from router.ttft import PARTS
from tests.router.fakes import FakeDecode, FakePrefill, Rig, rig, text_request, tiny_model

ANSWER = [70, 80, 90, 100]


def describe_metrics(prefill: FakePrefill, decode: FakeDecode) -> None:
    prefill.description.metrics_addresses.extend(["10.0.0.1:9000", "10.0.0.1:9001", "10.0.0.2:9002"])
    decode.description.metrics_addresses.append("10.0.0.3:9003")


@contextlib.asynccontextmanager
async def browsing(it: Rig) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose paths are those of the rig's page."""
    address = (await it.client.status()).page_address
    async with aiohttp.ClientSession(f"http://{address}") as session:
        yield session


async def never_told(_: object) -> None: ...


async def snapshots(page: aiohttp.ClientSession) -> AsyncGenerator[dict[str, Any], None]:
    """Those of a new stream."""
    async with page.get("/api/events") as response:
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_prometheus_is_told_of_every_process() -> None:
    async def run() -> None:
        async with rig(ANSWER, prepare=describe_metrics) as it, browsing(it) as page:
            response = await page.get("/sd")
            assert (response.status, response.content_type) == (200, "application/json")
            router = (await it.client.status()).metrics_address
            assert await response.json() == [
                {"targets": [router], "labels": {"role": "router", "node": "router"}},
                {"targets": ["10.0.0.1:9000"], "labels": {"role": "prefill", "node": "p0"}},
                {"targets": ["10.0.0.1:9001"], "labels": {"role": "worker", "node": "p0", "rank": "0"}},
                {"targets": ["10.0.0.2:9002"], "labels": {"role": "worker", "node": "p0", "rank": "1"}},
                {"targets": ["10.0.0.3:9003"], "labels": {"role": "decode", "node": "d0"}},
            ]

    asyncio.run(run())


def describe_all(prefill: FakePrefill, decode: FakeDecode) -> None:
    said = prefill.description
    said.layer_boundaries.extend([0, 1, 2])
    said.costs.extend([common_pb2.StageCost(base=0.5, per_token=0.25, per_pair=0.125)] * 2)
    said.free_tokens, said.queued_requests, said.running_requests = 1000, 3, 2
    said.backlog_tokens, said.backlog_seconds, said.chunk_policy = 40, 1.5, "optimal"
    said.prefix_cache.CopyFrom(prefill_pb2.PrefixCache(cached_tokens=8, query_tokens=100, hit_tokens=50))
    decode.description.slots_free, decode.description.slots_held = 60, 4
    decode.description.active_requests = 1


def test_a_snapshot_says_how_the_groups_are() -> None:
    async def run() -> None:
        async with rig(ANSWER, prepare=describe_all) as it, browsing(it) as page:
            snapshot = await (await page.get("/api/snapshot")).json()
            assert snapshot["router"] == {
                "name": "router",
                "model": "unused",
                "version": importlib.metadata.version("headwater"),
            }
            assert (snapshot["num_running"], snapshot["requests"]) == (0, [])
            same = {"state": "serving", "detail": "", "breaker": "closed", "epoch": "first", "transport": "memory"}
            assert snapshot["groups"] == [
                {
                    "name": "p0",
                    "role": "prefill",
                    "address": it.prefill_server.address,
                    "layout": "PP2 TP1",
                    "used_tokens": 24,
                    "capacity_tokens": 1024,
                    "page_tokens": 4,
                    "running_requests": 2,
                    "queued_requests": 3,
                    "stages": [
                        {"first_layer": 0, "end_layer": 1, "ranks": [0], "chunk_seconds": 0.5 + 4 / 4 + 16 / 8},
                        {"first_layer": 1, "end_layer": 2, "ranks": [1], "chunk_seconds": 0.5 + 4 / 4 + 16 / 8},
                    ],
                    "chunk_tokens": 4,
                    "chunk_policy": "optimal",
                    "backlog_tokens": 40,
                    "backlog_seconds": 1.5,
                    "prefix_cache": {"cached_tokens": 8, "query_tokens": 100, "hit_tokens": 50},
                    "slots_free": 0,
                    "slots_held": 0,
                    "slots_quarantined": 0,
                    **same,
                },
                {
                    "name": "d0",
                    "role": "decode",
                    "address": it.decode_server.address,
                    "layout": "fake",
                    "used_tokens": 0,
                    "capacity_tokens": 1024,
                    "page_tokens": 16,
                    "running_requests": 1,
                    "queued_requests": 0,
                    "stages": [],
                    "chunk_tokens": 0,
                    "chunk_policy": "",
                    "backlog_tokens": 0,
                    "backlog_seconds": 0,
                    "prefix_cache": None,
                    "slots_free": 60,
                    "slots_held": 4,
                    "slots_quarantined": 0,
                    **same,
                },
            ]

    asyncio.run(run())


def test_a_stream_tells_of_a_request_and_its_detail_of_its_chunks() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it, browsing(it) as page, contextlib.aclosing(snapshots(page)) as stream:
            assert (await anext(stream))["requests"] == []
            it.prefill.traces["a/1 ä"] = prefill_pb2.TracePrefillResponse(
                num_stages=2,
                stages=[
                    prefill_pb2.StageSpan(stage=0, start=1, end=2, request_id="a/1 ä", token_start=0, token_end=4),
                    prefill_pb2.StageSpan(stage=1, start=2, end=3, request_id="other", token_start=8, token_end=12),
                ],
                transfers=[prefill_pb2.TransferSpan(rank=1, start=2, end=4, token_start=0, token_end=4, num_bytes=64)],
            )
            request = text_request()
            request.request_id = "a/1 ä"
            responses = await it.answer(request)
            (seen,) = (await anext(stream))["requests"]
            ttft = responses[-1].finished.ttft
            assert seen["ttft"] == {name: getattr(ttft, name) for name in ("total", *PARTS)}
            assert 0 < seen["seconds"] <= seen["age_seconds"]
            assert {name: value for name, value in seen.items() if "seconds" not in name and name != "ttft"} == {
                "number": 1,
                "id": "a/1 ä",
                "event": "finished",
                "num_prompt_tokens": 5,
                "num_tokens_done": 5,
                "num_generated_tokens": 4,
                "prefill": "p0",
                "decode": "d0",
                "num_legs": 1,
                "outcome": "length",
                "detail": "",
            }
            detail = await (await page.get("/api/requests/a%2F1%20%C3%A4")).json()
            events = [event["event"] for event in detail["events"]]
            assert events[:4] == ["received", "tokenized", "paired", "admitted"]
            # Prefill and decode are heard on two paths.
            assert sorted(events[4:6]) == ["committed", "first_token_sent"]
            assert events[6:] == ["finished"]
            times = [event["seconds"] for event in detail["events"]]
            assert times == sorted(times)
            assert times[0] == 0
            span = {"start": 1.0, "end": 2.0, "token_start": 0, "token_end": 4}
            assert detail["traces"] == [
                {
                    "prefill": "p0",
                    "error": "",
                    "num_stages": 2,
                    "stages": [
                        {"stage": 0, "own": True, **span},
                        {"stage": 1, "own": False, "start": 2.0, "end": 3.0, "token_start": 8, "token_end": 12},
                    ],
                    "transfers": [{"rank": 1, "num_bytes": 64, **span, "start": 2.0, "end": 4.0}],
                }
            ]
            assert (await page.get("/api/requests/unknown")).status == 404

    asyncio.run(run())


def test_requests_that_fail_or_are_cancelled_are_remembered_with_the_reason() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it, browsing(it) as page:
            for failing, name in ((text_request(max_tokens=0), "zero"), (text_request(), "gone")):
                failing.request_id = name
                if name == "gone":
                    await it.prefill_server.stop(0)
                with pytest.raises(HeadwaterError):
                    await it.answer(failing)
            gone, zero = (await (await page.get("/api/snapshot")).json())["requests"]
            assert (zero["event"], zero["outcome"], zero["num_legs"]) == ("failed", "InvalidRequest", 0)
            assert zero["detail"].startswith("max_tokens is 0")
            assert (gone["event"], gone["outcome"], gone["ttft"]) == ("failed", "PeerUnavailable", None)
            detail = await (await page.get("/api/requests/gone")).json()
            assert all("p0 at" in trace["error"] for trace in detail["traces"])

    asyncio.run(run())


def test_only_what_exists_can_be_read_and_nothing_written() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it, browsing(it) as page:
            for method, path, status in (
                ("POST", "/", 405),
                ("POST", "/sd", 405),
                ("PUT", "/api/requests/x", 405),
                ("DELETE", "/sd", 405),
                ("GET", "/other", 404),
                ("POST", "/other", 404),
            ):
                response = await page.request(method, path)
                assert response.status == status, (method, path)
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            # A stranger's page whose name was made to lead here.
            assert (await page.get("/sd", headers={"Host": "stranger.example:80"})).status == 421
            assert (await page.get("/sd", headers={"Host": "localhost:80"})).status == 200

    asyncio.run(run())


def test_the_page_ends_with_its_router() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            async with rig(ANSWER) as it:
                address = (await it.client.status()).page_address
                # Somebody watches, and does not go away by himself.
                watching = await session.get(f"http://{address}/api/events")
                await watching.content.readline()
                assert is_open(address)
            assert not is_open(address)
            # What was sent ended in order.
            assert (await watching.content.read()).endswith(b"\n")

    asyncio.run(run())


def test_the_page_itself_needs_nothing_from_elsewhere() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it, browsing(it) as page:
            for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
                response = await page.get(path)
                assert (response.status, response.content_type, response.charset) == (200, kind, "utf-8")
                text = await response.text()
                # The one in the icon, and one in a comment, name what they are and where colours come from.
                foreign = set(re.findall(r"https?://[^\s'\")]+", text))
                assert foreign <= {"http://www.w3.org/2000/svg", "https://personal.sron.nl/~pault/"}
                assert "innerHTML" not in text

    asyncio.run(run())


def test_status_says_where_the_page_is(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            assert await asyncio.to_thread(main, ["status", "--router", it.address]) == 0
            assert f"page: http://{(await it.client.status()).page_address}/\n" in capsys.readouterr().out

    asyncio.run(run())


def test_an_address_that_cannot_be_had_is_refused_before_anything_serves() -> None:
    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            file = f'[model]\npath = "m"\n[router]\naddress = "127.0.0.1:0"\npage_address = "{address}"\n'
            with pytest.raises(InvalidConfig, match=f"cannot serve the page on {address}: .*another page_address"):
                async with running_router(parse_cluster(file), tiny_model()):
                    pass
        with pytest.raises(InvalidConfig, match=r"0\.0\.0\.0:0 is no loopback address, and there is no certificate"):
            PageServer("0.0.0.0:0", [], never_told, 1)

    asyncio.run(run())


def test_with_a_certificate_the_page_is_encrypted_and_prometheus_is_told(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    paths = [tmp_path / name for name in ("ca.pem", "host.pem", "host-key.pem")]
    authority.cert_pem.write_to_path(str(paths[0]))
    certificate.cert_chain_pems[0].write_to_path(str(paths[1]))
    certificate.private_key_pem.write_to_path(str(paths[2]))
    own = Credentials(*map(str, paths), mutual=True)

    async def run() -> None:
        async with rig(ANSWER) as it, aiohttp.ClientSession() as session:
            url = f"https://{(await it.client.status()).page_address}/sd"
            context = ssl.create_default_context(cafile=own.ca)
            with pytest.raises(aiohttp.ClientError):
                await session.get(url, ssl=context)
            context.load_cert_chain(own.cert, own.key)
            (router,) = await (await session.get(url, ssl=context)).json()
            assert router["labels"] == {"role": "router", "node": "router", "__scheme__": "https"}

    security.use(own)
    try:
        asyncio.run(run())
    finally:
        security.use(Credentials())
