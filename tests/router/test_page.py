"""The router's HTTP page, over real HTTP and groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import trustme

from headwater import security
from headwater.cluster import parse_cluster
from headwater.errors import InvalidConfig
from headwater.security import Credentials
from router.page.server import PageServer
from router.server import running_router
from tests.router.fakes import FakeDecode, FakePrefill, Rig, rig, tiny_model

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


def test_only_what_exists_can_be_read_and_nothing_written() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it, browsing(it) as page:
            for method, path, status in (
                ("POST", "/sd", 405),
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
        async with rig(ANSWER) as it:
            address = (await it.client.status()).page_address
            assert is_open(address)
        assert not is_open(address)

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
            PageServer("0.0.0.0:0", [])

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
