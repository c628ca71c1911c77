"""Draining, cancelling, limits; and the commands and clients for them. Real gRPC, groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from headwater.client import Client, prompt_request
from headwater.cluster import load_cluster
from headwater.errors import CapacityError, HeadwaterError, InvalidConfig, InvalidRequest, RequestCancelled
from headwater.v1 import prefill_pb2, router_pb2
from router.bench import Load, run_bench
from router.main import main
from router.show import watch_status
from router.snapshot import State
from router.ttft import PARTS
from tests.router.fakes import FakePrefill, never, rig, site, text_request, tiny_tokenizer

ANSWER = [70, 80, 90, 100]


def hold(group: FakePrefill) -> asyncio.Event:
    """The group answers nothing any more. What is returned is set when it is asked."""
    asked = asyncio.Event()

    async def script(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        asked.set()
        await never()
        yield prefill_pb2.PrefillResponse()

    group.script = script
    return asked


def test_a_drained_group_gets_nothing_new_until_it_is_undrained() -> None:
    async def run() -> None:
        async with site(ANSWER, 2, 'prefill_policy = "round_robin"') as it:
            assert await asyncio.to_thread(main, ["drain", "p0", "--router", it.address]) == 0
            while (await it.client.status()).groups[0].state != State.DRAINING:
                await asyncio.sleep(0.01)
            for _ in range(4):
                await it.answer(text_request())
            assert [len(group.requests) for group in it.prefill] == [0, 4]
            assert await asyncio.to_thread(main, ["undrain", "p0", "--router", it.address]) == 0
            while (await it.client.status()).groups[0].state != State.SERVING:
                await asyncio.sleep(0.01)
            for _ in range(4):
                await it.answer(text_request())
            assert [len(group.requests) for group in it.prefill] == [2, 6]
            with pytest.raises(InvalidRequest, match="there is no group 'p9'; there are d0, d1, p0, p1"):
                await it.client.drain("p9", draining=True)

    asyncio.run(run())


def test_an_aborted_request_ends_on_both_groups_and_its_client_is_told() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            asked = hold(it.prefill)
            request = text_request()
            request.request_id = "long one"
            answering = asyncio.ensure_future(it.answer(request))
            await asked.wait()
            assert await asyncio.to_thread(main, ["abort", "long one", "--router", it.address]) == 0
            with pytest.raises(RequestCancelled, match="request long one was cancelled at the router"):
                await answering
            await it.prefill.cancelled.wait()
            await it.decode.cancelled.wait()
            with pytest.raises(InvalidRequest, match="no request 'long one' is under way"):
                await it.client.cancel("long one")

    asyncio.run(run())


def test_one_request_too_many_is_refused_with_a_hint_and_counted() -> None:
    def refusals() -> float:
        return REGISTRY.get_sample_value("headwater_requests_total", {"outcome": "CapacityError"}) or 0.0

    async def run() -> None:
        before = refusals()
        async with site(ANSWER, 1, "max_requests = 1") as it:
            asked = hold(it.prefill[0])
            answering = asyncio.ensure_future(it.answer(text_request()))
            await asked.wait()
            with pytest.raises(CapacityError, match="1 requests are under way") as refused:
                await it.answer(text_request())
            assert refused.value.retry_after_seconds == 1.0
            assert refusals() - before == 1
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    asyncio.run(run())


def test_priority_reaches_the_prefill_group() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            await it.answer(prompt_request("the quick", 2, priority=-3))
            assert it.prefill.requests[0].priority == -3

    asyncio.run(run())


def test_a_client_for_threads_answers_as_the_other_one_does() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            expected = await it.client.complete("the quick brown fox", 4)

            def use() -> None:
                with Client(it.address) as client:
                    answer = client.complete("the quick brown fox", 4)
                    assert (answer.token_ids, answer.text, answer.reason) == (ANSWER, expected.text, "length")
                    assert answer.text == tiny_tokenizer().decode(ANSWER)
                    assert [group.name for group in client.status().groups] == ["p0", "d0"]
                    with pytest.raises(InvalidRequest, match="empty"):
                        client.complete([], 4)

            await asyncio.to_thread(use)
            assert expected.token_ids == ANSWER

    asyncio.run(run())


def test_bench_counts_answers_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            refused = [CapacityError("full")] * 2

            async def script(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                if refused:
                    raise refused.pop()
                async for response in it.prefill.run(request):
                    yield response

            it.prefill.script = script
            load = Load(requests=6, prompt_tokens=10, max_tokens=4, concurrency=1, rate=0, seed=1)
            assert await run_bench(it.address, load, as_json=True) == 0
            load = Load(requests=1, prompt_tokens=10, max_tokens=4, concurrency=1, rate=1000, seed=1)
            assert await run_bench(it.address, load, as_json=False) == 0

    # Ids of the load are not in the fake's small vocabulary.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.bench._LAST_ID", 200)
        asyncio.run(run())
    first, *rest = capsys.readouterr().out.splitlines()
    numbers = json.loads(first)
    assert (numbers["answered"], numbers["errors"]) == (4, {"CapacityError": 2})
    assert set(numbers["ttft_seconds"]) == {"p50", "p90", "p99", "max"}
    assert set(numbers["ttft_parts_median_seconds"]) == set(PARTS)
    assert any("ttft_seconds" in line for line in rest)


def test_a_client_without_a_router_says_so() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(HeadwaterError, match=r"router at 127\.0\.0\.1:1"):
        client.status()


def test_prompts_are_text_or_tokens_or_a_chat() -> None:
    assert prompt_request("hello", 3).text == "hello"
    assert list(prompt_request([1, 2], 3, seed=0).token_ids.ids) == [1, 2]
    chat = prompt_request([("system", "be brief"), ("user", "hello")], 3)
    assert [(message.role, message.content) for message in chat.chat.messages] == [
        ("system", "be brief"),
        ("user", "hello"),
    ]
    assert (chat.has_seed, prompt_request("x", 1, seed=0).has_seed) == (False, True)


def test_status_is_shown_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    states = iter(["serving", "draining"])

    def ask() -> router_pb2.StatusResponse:
        for state in states:
            return router_pb2.StatusResponse(groups=[router_pb2.GroupStatus(name="p0", state=state, breaker="closed")])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch_status(ask, 0.001, as_json=False)
    assert "draining" in capsys.readouterr().out
    states = iter(["serving", "draining"])
    with pytest.raises(KeyboardInterrupt):
        watch_status(ask, 0.001, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["groups"][0]["state"] for line in lines] == ["serving", "draining"]


def test_init_writes_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    assert main(["init", str(path), "--model", "/m", "--pp", "4", "--tp", "2"]) == 0
    cluster = load_cluster(path)
    assert (cluster.model.path, cluster.prefill[0].pp, cluster.prefill[0].tp) == ("/m", 4, 2)
    # What is commented out is right, too.
    text = path.read_text(encoding="utf-8")
    lines = [line.removeprefix("# ") if " = " in line or line.startswith("# [") else line for line in text.splitlines()]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert load_cluster(path).deadlines.drain == 30
    assert main(["init", str(path)]) == 2
    with pytest.raises(InvalidConfig, match="cannot be written"):
        from router.init import write_cluster_file

        write_cluster_file(tmp_path / "no" / "folder", "/m", 1, 1)


def test_schema_and_completion_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["$defs"]["Cluster"]["properties"]) >= {"model", "router", "prefill", "decode", "deadlines"}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "headwater" in capsys.readouterr().out
