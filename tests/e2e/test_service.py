"""The whole service on PP2: order of events, bad input, cancel, sampling, stop conditions, metrics, lost processes."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headwater.cluster import Cluster, Router
from headwater.rpc import open_channel
from headwater.v1 import common_pb2, prefill_pb2, router_pb2, router_pb2_grpc
from router.server import load_model, running_router
from router.supervisor import Supervisor
from router.ttft import PARTS
from tests import tiny_models
from tests.collector import CollectedSpan, Collector, collector
from tests.harness import (
    Answer,
    Group,
    ask,
    ask_all,
    assert_balanced,
    events,
    model_folder,
    prefill_stub,
    processes,
    until_paired,
    write_cluster,
)
from tests.oracle import Oracle, prompts

CHUNK, PAGE, POOL = 64, 16, 2048
OPTIONS = (("chunk_tokens", CHUNK), ("page_size", PAGE), ("pool_tokens", POOL))
VOCABULARY = 49152


class Service:
    """A running cluster whose every test ends balanced."""

    def __init__(self, cluster: Cluster, logs: Path, supervisor: Supervisor, collected: Collector) -> None:
        self.cluster = cluster
        self.router = cluster.router.address
        self.logs = logs
        self.supervisor = supervisor
        self.collected = collected


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    path = folder / "cluster.toml"
    cluster = write_cluster(path, model_folder(), [Group("p0", 2, 1, OPTIONS)])
    with collector() as collected, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with processes(cluster, path, ["p0", "d0", "router"], folder) as supervisor:
            yield Service(cluster, folder, supervisor, collected)


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    asyncio.run(assert_balanced(running.cluster, ["p0"]))


_first_tokens = itertools.count(1000)


@pytest.fixture
def prompt() -> list[int]:
    """Of each test its own, so that nothing of it is cached."""
    return [next(_first_tokens), *prompts(model_folder(), [639])[0]]


def test_the_first_receipt_is_there_long_before_the_last_chunk_starts(service: Service, prompt: list[int]) -> None:
    """S02 as well: no KV leaves a rank before the step that fills it has ended there."""
    answer = asyncio.run(ask(service.router, prompt, 2))
    transfer, request = answer.accepted.transfer_id, answer.accepted.request_id
    receipts = events(service.logs / "d0.log", event="chunk_landed", transfer=transfer)
    started = events(service.logs / "p0.log", event="chunk_started", request=request, rank=0)
    assert [entry["tokens"] for entry in started] == [[start, start + CHUNK] for start in range(0, 640, CHUNK)]
    # One receipt of each stage for each chunk, and the first one before even the last but one chunk started.
    assert len(receipts) == 2 * len(started)
    assert receipts[0]["monotonic"] < started[-2]["monotonic"]
    # Each receipt follows the computing of its chunk on its rank.
    for receipt in receipts:
        where = {"event": "chunk_finished", "request": request, "rank": receipt["rank"], "tokens": receipt["tokens"]}
        (computed,) = events(service.logs / "p0.log", **where)
        assert computed["monotonic"] < receipt["monotonic"]
    (committed,) = events(service.logs / "d0.log", event="committed", transfer=transfer)
    assert committed["monotonic"] > receipts[-1]["monotonic"]
    assert committed["num_bytes"] == 640 * 30 * 3 * 2 * 64 * 4


def test_a_client_sees_progress_then_tokens_then_the_parts_of_ttft(service: Service, prompt: list[int]) -> None:
    answer = asyncio.run(ask(service.router, prompt, 4))
    assert [kind for kind in answer.kinds if kind != "progress"] == ["accepted", *["token"] * 4, "finished"]
    # The first chunk is told of at once, the last one not; how many others are is a matter of time.
    assert 1 <= answer.kinds.index("token") - 1 <= 9
    ttft = answer.finished.ttft
    parts = [getattr(ttft, name) for name in PARTS]
    assert sum(parts) == pytest.approx(ttft.total, abs=1e-9)
    assert min(parts) >= 0
    assert answer.finished.reason == common_pb2.FINISH_REASON_LENGTH


def test_a_trace_shows_every_chunk_on_every_stage_and_its_transfer(service: Service, prompt: list[int]) -> None:
    answer = asyncio.run(ask(service.router, prompt, 2))
    asyncio.run(assert_balanced(service.cluster, ["p0"]))
    request_id = answer.accepted.request_id

    async def traced() -> prefill_pb2.TracePrefillResponse:
        async with prefill_stub(service.cluster.prefill[0].address) as stub:
            return await stub.TracePrefill(prefill_pb2.TracePrefillRequest(request_id=request_id))

    trace = asyncio.run(traced())
    assert trace.num_stages == 2
    cuts = [(start, start + CHUNK) for start in range(0, 640, CHUNK)]
    for stage in (0, 1):
        spans = [span for span in trace.stages if span.stage == stage]
        assert [(span.token_start, span.token_end) for span in spans] == cuts
        # One chunk at a time, as the leader saw it.
        assert all(one.start < one.end for one in spans)
        assert sorted(span.end for span in spans) == [span.end for span in spans]
        sent = [span for span in trace.transfers if span.rank == stage]
        assert [(span.token_start, span.token_end) for span in sent] == cuts
        assert sum(span.num_bytes for span in sent) == 640 * 15 * 3 * 2 * 64 * 4


def test_one_trace_goes_through_every_process(service: Service, prompt: list[int]) -> None:
    answer = asyncio.run(ask(service.router, prompt, 3))
    request_id = answer.accepted.request_id

    def spans(collected: list[CollectedSpan]) -> list[CollectedSpan]:
        ids = {span.trace_id for span in collected if span.attributes.get("headwater.request.id") == request_id}
        return [span for span in collected if span.trace_id in ids]

    # All that there are; each process exports when it likes.
    num_chunks = 2 * len(range(0, 640, CHUNK))
    trace = spans(service.collected.wait(lambda collected: len(spans(collected)) >= 9 + num_chunks))
    by_id = {span.span_id: span for span in trace}
    assert len({span.trace_id for span in trace}) == 1

    def path(span: CollectedSpan) -> str:
        process = str(span.resource["service.name"]).removeprefix("headwater-")
        own = f"{process} {span.name}"
        return f"{path(by_id[span.parent_id])}/{own}" if span.parent_id else own

    prefill = "router generate/router prefill/prefill prefill"
    assert sorted(path(span) for span in trace) == sorted(
        [
            "router generate",
            "router generate/router prefill",
            "router generate/router decode",
            "router generate/router decode/decode receive",
            "router generate/router decode/decode decode",
            prefill,
            f"{prefill}/prefill queue",
            *[f"{prefill}/worker deliver"] * 2,
            *[f"{prefill}/prefill chunk"] * num_chunks,
        ]
    )
    deliveries = [span for span in trace if span.name == "deliver"]
    assert {span.resource["service.instance.id"] for span in deliveries} == {"p0/0", "p0/1"}
    (receive,) = (span for span in trace if span.name == "receive")
    assert set(receive.links) == {span.span_id for span in deliveries}
    # Everybody counts the same bytes.
    num_bytes = 640 * 30 * 3 * 2 * 64 * 4
    assert sum(int(str(span.attributes["headwater.bytes"])) for span in deliveries) == num_bytes
    assert receive.attributes["headwater.bytes"] == num_bytes
    (decode,) = (span for span in trace if path(span).endswith("decode decode"))
    assert decode.attributes["gen_ai.usage.output_tokens"] == 3
    # One host, one clock: what is received is decoded.
    assert receive.start < receive.end <= decode.end


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"text": ""}, "the prompt is empty"),
        ({"token_ids": router_pb2.TokenIds()}, "the prompt is empty"),
        (
            {"token_ids": router_pb2.TokenIds(ids=[5, VOCABULARY])},
            f"{VOCABULARY} at position 1 is not in the vocabulary",
        ),
        ({"token_ids": router_pb2.TokenIds(ids=[5] * 8192)}, "the model's context is 8192"),
        ({"token_ids": router_pb2.TokenIds(ids=[5] * (POOL + 1))}, str(POOL)),
        ({"text": "Hello", "max_tokens": 0}, "max_tokens is 0"),
        ({"text": "Hello", "max_tokens": -3}, "max_tokens is -3"),
        ({"text": "Hello", "sampling": common_pb2.SamplingParams(temperature=-1)}, "temperature is -1"),
    ],
)
def test_bad_input_is_refused_in_words_and_the_next_request_works(
    service: Service, request_fields: dict[str, object], message: str
) -> None:
    async def run() -> None:
        async with open_channel(service.router) as channel:
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(
                router_pb2.GenerateRequest(**({"max_tokens": 4} | request_fields)), timeout=1
            )
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call:
                    pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in (raised.value.details() or "")
        assert (await ask(service.router, [1, 2, 3], 2)).finished.num_generated_tokens == 2

    asyncio.run(run())


def test_a_client_that_leaves_frees_everything_and_the_next_request_works(service: Service, prompt: list[int]) -> None:
    async def run() -> None:
        async with open_channel(service.router) as channel:
            ids = router_pb2.TokenIds(ids=prompt * 3)
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(
                router_pb2.GenerateRequest(token_ids=ids, max_tokens=50, request_id="leaver")
            )
            async for response in call:
                if response.HasField("progress"):
                    break
            call.cancel()
        assert len((await ask(service.router, prompt[:100], 3)).tokens) == 3
        await assert_balanced(service.cluster, ["p0"])

    asyncio.run(run())
    computed = events(service.logs / "p0.log", event="chunk_finished", request="leaver", rank=0)
    # 30 chunks were asked for; how many were computed before the cancel arrived is the machine's business.
    assert 1 <= len(computed) < 30
    # The leader hears of it from the router, or first from a writer whose decode node has ended the transfer.
    ends = [entry["event"] for entry in events(service.logs / "p0.log", request="leaver")]
    assert ends.count("cancelled") + ends.count("failed") >= 1


def test_many_requests_at_once(service: Service, prompt: list[int]) -> None:
    together = asyncio.run(ask_all(service.router, [prompt[: 50 * n] for n in range(1, 7)], 8))
    alone = [asyncio.run(ask(service.router, prompt[: 50 * n], 8)) for n in range(1, 7)]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]


def test_sampling_depends_on_the_seed_and_on_nothing_else(service: Service, prompt: list[int]) -> None:
    async def sampled(seed: int) -> list[int]:
        sampling = common_pb2.SamplingParams(temperature=1.0, top_p=0.95, seed=seed)
        return (await ask(service.router, prompt[:30], 12, sampling=sampling, has_seed=True)).tokens

    async def run() -> list[list[int]]:
        return [await sampled(7), *await asyncio.gather(sampled(7), sampled(8), sampled(9))]

    first, again, other, another = asyncio.run(run())
    assert first == again
    assert len({tuple(first), tuple(other), tuple(another)}) == 3


def test_a_short_prompt_is_computed_by_the_decode_node_and_gives_the_oracles_tokens(
    service: Service, prompt: list[int]
) -> None:
    oracle = Oracle(model_folder())
    sampling = common_pb2.SamplingParams(temperature=1.0, top_p=0.95, seed=7)

    async def run() -> tuple[Answer, Answer, Answer, Answer]:
        # A second router over the same groups.
        section = Router(address="127.0.0.1:0", local_prefill_tokens=30)
        cluster = msgspec.structs.replace(service.cluster, router=section)
        async with running_router(cluster, load_model(cluster)) as address:
            greedy, sampled, longer = await asyncio.gather(
                ask(address, prompt[:30], 12),
                ask(address, prompt[:30], 12, sampling=sampling, has_seed=True),
                ask(address, prompt[:31], 2),
            )
            return greedy, sampled, longer, await ask(address, prompt[:1], 1)

    greedy, sampled, longer, single = asyncio.run(run())
    assert greedy.tokens == oracle.greedy(prompt[:30], 12)
    assert single.tokens == oracle.greedy(prompt[:1], 1)
    assert longer.tokens == oracle.greedy(prompt[:31], 2)
    through_prefill = asyncio.run(ask(service.router, prompt[:30], 12, sampling=sampling, has_seed=True))
    assert sampled.tokens == through_prefill.tokens
    for answer in (greedy, sampled, single):
        assert (answer.accepted.prefill_group, answer.accepted.decode_group) == ("d0", "d0")
        assert (answer.accepted.transfer_id, answer.accepted.num_chunks) == ("", 1)
        assert answer.finished.ttft.compute > 0
    assert longer.accepted.prefill_group == "p0"


def test_answers_end_at_eos_at_max_tokens_and_at_stop_strings(service: Service) -> None:
    async def chat(**options: object) -> tuple[str, common_pb2.FinishReason.ValueType, int]:
        fields = {"max_tokens": 40} | options
        request = router_pb2.GenerateRequest(**fields)
        request.chat.messages.add(role="user", content="What is the capital of France? Answer with one word.")
        text = ""
        async with open_channel(service.router) as channel:
            async for response in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
                text += response.token.text + response.finished.text
                finished = response.finished
        return text, finished.reason, finished.num_generated_tokens

    text, reason, count = asyncio.run(chat())
    assert "Paris" in text
    assert reason == common_pb2.FINISH_REASON_EOS
    assert asyncio.run(chat(max_tokens=count - 1))[1] == common_pb2.FINISH_REASON_LENGTH
    assert asyncio.run(chat(max_tokens=1))[1:] == (common_pb2.FINISH_REASON_LENGTH, 1)
    before, stopped, _ = asyncio.run(chat(stop=["ris"]))
    assert stopped == common_pb2.FINISH_REASON_STOP
    assert before == text.partition("ris")[0]


def test_every_process_serves_metrics_and_the_router_its_ttft(service: Service) -> None:
    async def status() -> router_pb2.StatusResponse:
        async with open_channel(service.router) as channel:
            return await router_pb2_grpc.RouterServiceStub(channel).Status(router_pb2.StatusRequest())

    response = asyncio.run(status())
    assert [(group.name, group.state) for group in response.groups] == [("p0", "serving"), ("d0", "serving")]
    addresses = [address for group in response.groups for address in group.metrics_addresses]
    assert len(addresses) == 1 + 2 + 1
    for address in addresses:
        assert "headwater_" in _get(address)
    router = _get(response.metrics_address)
    assert "gen_ai_server_time_to_first_token_seconds_count" in router
    assert 'headwater_ttft_part_seconds_count{part="compute"}' in router


def _get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        return str(response.read(), "utf-8")


def test_every_server_reflects_its_services(service: Service) -> None:
    async def listed(address: str) -> set[str]:
        async with open_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            async for response in call:
                return {entry.name for entry in response.list_services_response.service}
        return set()

    cluster = service.cluster
    for address, own in (
        (cluster.router.address, "RouterService"),
        (cluster.prefill[0].address, "PrefillService"),
        (cluster.decode[0].address, "DecodeService"),
    ):
        assert {f"headwater.v1.{own}", "grpc.health.v1.Health"} <= asyncio.run(listed(address))


def test_a_decode_node_that_is_not_there_or_has_another_model(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    cluster = write_cluster(path, model_folder(), [Group("p0", 1, 1, OPTIONS)])
    other = tmp_path / "other.toml"
    tiny = tiny_models.make("llama", tmp_path / "model")
    other.write_text(path.read_text().replace(str(model_folder()), str(tiny)))
    with processes(cluster, path, ["p0", "router"], tmp_path):

        async def refused() -> grpc.aio.AioRpcError:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await ask(cluster.router.address, [1, 2, 3], 4)
            return raised.value

        error = asyncio.run(refused())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert cluster.decode[0].address in (error.details() or "")
        with processes(cluster, other, ["d0"], tmp_path):
            # The router sees it within a heartbeat; until then it says that it is unreachable.
            while (error := asyncio.run(refused())).code() is grpc.StatusCode.UNAVAILABLE:
                pass
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "fingerprint" in (error.details() or "")
        with processes(cluster, path, ["d0"], tmp_path):
            asyncio.run(until_paired(cluster.router.address, "d0"))
            assert len(asyncio.run(ask(cluster.router.address, [1, 2, 3], 4)).tokens) == 4
            asyncio.run(assert_balanced(cluster, ["p0"]))


def test_a_group_on_two_hosts_whose_second_rank_is_started_by_hand(tmp_path: Path) -> None:
    model = tiny_models.make("qwen2", tmp_path / "model")
    path = tmp_path / "cluster.toml"
    # Two names of this machine: the leader starts the ranks of its own name only.
    hosts = ("hosts", ["127.0.0.1", "localhost"])
    cluster = write_cluster(path, model, [Group("p0", 2, 1, (*OPTIONS, hosts))])
    (prompt,) = tiny_models.prompts([150])
    with processes(cluster, path, ["p0", "p0-1", "d0", "router"], tmp_path):
        answer = asyncio.run(ask(cluster.router.address, prompt, 16))
        asyncio.run(assert_balanced(cluster, ["p0"]))
    assert answer.tokens == Oracle(model).greedy(prompt, 16)
    (started_by_hand,) = events(tmp_path / "p0-1.log", event="chunk_finished", tokens=[128, 150])
    assert started_by_hand["rank"] == 1
