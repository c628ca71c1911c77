"""Credentials: who may listen, who may ask, and that all of a cluster works with them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater import security
from headwater.client import AsyncClient
from headwater.cluster import Security, load_cluster, parse_cluster
from headwater.errors import InvalidConfig, PeerUnavailable, Unauthenticated
from headwater.rpc import Server, open_channel
from headwater.security import Credentials
from kv_transfer.metrics_server import MetricsServer
from prefill_node.frames import Frames
from tests import tiny_models
from tests.harness import Group, assert_balanced, processes, until_paired, write_cluster
from tests.oracle import Oracle
from tests.router.fakes import rig, text_request

TOKEN = "s3cret-token"


@dataclasses.dataclass(frozen=True)
class Files:
    """A host's certificate, and one that somebody else has signed."""

    own: Credentials
    strange: Credentials


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")

    def issue(name: str) -> Credentials:
        ca = trustme.CA()
        certificate = ca.issue_cert("127.0.0.1", "localhost")
        ca.cert_pem.write_to_path(str(folder / f"{name}-ca.pem"))
        certificate.private_key_pem.write_to_path(str(folder / f"{name}-key.pem"))
        chain = b"".join(part.bytes() for part in certificate.cert_chain_pems)
        (folder / f"{name}.pem").write_bytes(chain)
        paths = [str(folder / f"{name}{part}.pem") for part in ("-ca", "", "-key")]
        return Credentials(*paths, mutual=True)

    return Files(issue("own"), issue("strange"))


@pytest.fixture(autouse=True)
def _plain_again() -> Iterator[None]:
    yield
    security.use(Credentials())


async def healthy(address: str) -> None:
    """Raises unless the server at `address` answers this process's credentials."""
    async with open_channel(address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


@contextlib.asynccontextmanager
async def serving(credentials: Credentials) -> AsyncIterator[str]:
    security.use(credentials)
    server = Server("127.0.0.1:0", [])
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


def test_both_sides_must_have_a_certificate_of_one_authority(files: Files) -> None:
    async def run() -> None:
        async with serving(files.own) as address:
            await healthy(address)
            for other in (files.strange, Credentials(ca=files.own.ca), Credentials()):
                security.use(other)
                with pytest.raises(grpc.RpcError) as refused:
                    await healthy(address)
                assert isinstance(refused.value, grpc.aio.AioRpcError)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_without_mutual_a_client_needs_the_authority_only(files: Files) -> None:
    async def run() -> None:
        async with serving(dataclasses.replace(files.own, mutual=False)) as address:
            security.use(Credentials(ca=files.own.ca))
            await healthy(address)

    asyncio.run(run())


def test_metrics_are_served_with_the_same_certificate(files: Files) -> None:
    security.use(files.own)
    exporter = MetricsServer("127.0.0.1", 0, role="router", node="r", config={})
    url = f"https://{exporter.address}/metrics"

    def get(context: ssl.SSLContext) -> bytes:
        with urllib.request.urlopen(url, context=context, timeout=5) as response:
            return bytes(response.read())

    try:
        context = ssl.create_default_context(cafile=files.own.ca)
        with pytest.raises(OSError, match=r"(?i)certificate|ssl|closed|reset"):
            get(context)
        context.load_cert_chain(files.own.cert, files.own.key)
        assert b"python_info" in get(context)
    finally:
        exporter.stop()


def test_the_log_s_connection_is_encrypted_too(files: Files) -> None:
    async def run() -> None:
        security.use(files.own)
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        ended: asyncio.Queue[str] = asyncio.Queue()

        def near() -> Frames:
            return Frames(heard.put_nowait, ended.put_nowait, 60)

        def far() -> Frames:
            return Frames(lambda _: None, lambda _: None, 60)

        listening = security.credentials().context(server=True)
        server = await loop.create_server(near, "127.0.0.1", 0, ssl=listening)
        port = server.sockets[0].getsockname()[1]
        asking = security.credentials().context(server=False)
        _, frames = await loop.create_connection(far, "127.0.0.1", port, ssl=asking)
        frames.send(b"x" * 100_000)
        assert await heard.get() == b"x" * 100_000
        frames.close()
        await ended.get()
        # With another authority's certificate nobody gets as far as saying anything.
        security.use(files.strange)
        asking = security.credentials().context(server=False)
        with pytest.raises(ssl.SSLError):
            await loop.create_connection(far, "127.0.0.1", port, ssl=asking)
        assert heard.empty()
        server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_public_api_asks_for_its_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n", encoding="utf-8")

    async def run() -> None:
        security.use(Credentials(token_file=str(file)))
        async with rig([70, 80]) as it:
            assert (await it.client.complete("the quick", 2)).token_ids == [70, 80]
            for wrong in ("", "other", TOKEN + "x"):
                async with AsyncClient(it.address, token=wrong) as client:
                    with pytest.raises(Unauthenticated, match="asks for a token"):
                        await client.status()
                    with pytest.raises(Unauthenticated, match="asks for a token"):
                        await client.complete("the", 2)
            assert len(it.prefill.requests) == 1
            # Health is everybody's.
            await healthy(it.address)
            assert len(await it.answer(text_request(max_tokens=2))) > 2

    asyncio.run(run())


def test_plain_text_is_for_loopback_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        Credentials().check_listening(address)
    with pytest.raises(InvalidConfig, match=r"10\.0\.0\.1:1 is no loopback address, and there is no certificate"):
        Credentials().check_listening("10.0.0.1:1")
    with pytest.raises(InvalidConfig, match="no loopback address"):
        Server("0.0.0.0:0", [])
    Credentials(allow_plain_text=True).check_listening("10.0.0.1:1")
    assert "plain text on an address that others can reach" in caplog.text


def test_credentials_travel_in_the_environment(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dataclasses.replace(files.own, token_file="/t", allow_plain_text=True)
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert security.of_environment() == given
    assert Credentials().environment() == {}


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="tls_ca, tls_cert and tls_key belong together"):
        parse_cluster('[model]\npath = "m"\n[security]\ntls_ca = "ca.pem"\n')
    security.use(Security(tls_ca="no-ca", tls_cert="no-cert", tls_key="no-key"))
    with pytest.raises(InvalidConfig, match="tls_key no-key cannot be read"):
        Server("127.0.0.1:0", [])
    with pytest.raises(InvalidConfig, match=r"TLS files of \[security\] cannot be used"):
        security.credentials().context(server=True)
    empty = tmp_path / "empty"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidConfig, match="is empty"):
        _ = Credentials(token_file=str(empty)).token


def test_groups_join_a_router_that_does_not_list_them_with_everything_on(files: Files, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN, encoding="utf-8")
    model = tiny_models.make("llama", tmp_path / "model")
    path = tmp_path / "cluster.toml"
    write_cluster(path, model, [Group("p0", 2, 1, (("chunk_tokens", 16), ("page_size", 16)))])
    own = files.own
    section = f'tls_ca = "{own.ca}"\ntls_cert = "{own.cert}"\ntls_key = "{own.key}"\ntoken_file = "{token}"\n'
    text = path.read_text(encoding="utf-8") + "[security]\n" + section
    router = load_cluster(path).router.address
    path.write_text(f'routers = ["{router}"]\n{text}', encoding="utf-8")
    cluster = load_cluster(path)
    alone = tmp_path / "router.toml"
    without_groups = text[: text.index("[[prefill]]")] + text[text.index("[security]") :]
    alone.write_text(without_groups, encoding="utf-8")
    security.use(cluster.security)
    (prompt,) = tiny_models.prompts([100])

    async def run() -> None:
        await until_paired(cluster.router.address, "p0")
        async with AsyncClient(cluster.router.address) as client:
            assert (await client.complete(prompt, 5)).token_ids == Oracle(model).greedy(prompt, 5)
        await assert_balanced(cluster, ["p0"])
        security.use(Credentials())
        async with AsyncClient(cluster.router.address, token=TOKEN) as client:
            with pytest.raises(PeerUnavailable):
                await client.status()
        security.use(cluster.security)

    with (
        processes(load_cluster(alone), alone, ["router"], tmp_path),
        processes(cluster, path, ["p0", "d0"], tmp_path),
    ):
        asyncio.run(run())
    logs = "".join(file.read_text(encoding="utf-8") for file in tmp_path.glob("*.log"))
    assert logs
    assert TOKEN not in logs
