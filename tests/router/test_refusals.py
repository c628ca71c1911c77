"""Requests that can never work: the exact reason, and no group hears of them."""

from __future__ import annotations

import asyncio
import re

import pytest

from headwater.client import AsyncClient
from headwater.cluster import parse_cluster
from headwater.errors import InvalidRequest, PeerUnavailable
from headwater.v1 import common_pb2, router_pb2
from router.server import running_router
from tests.router.fakes import FakeDecode, FakePrefill, kinds, rig, text_request, tiny_model

IDS = router_pb2.TokenIds(ids=[1, 2, 3])


def sampled(**fields: float) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)  # type: ignore[arg-type]


REFUSED = [
    (router_pb2.GenerateRequest(max_tokens=1), "the request has no prompt; set text, token_ids or chat."),
    (router_pb2.GenerateRequest(text="", max_tokens=1), "the prompt is empty; it must have at least one token."),
    (
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(), max_tokens=1),
        "the prompt is empty; it must have at least one token.",
    ),
    (
        router_pb2.GenerateRequest(chat=router_pb2.Chat(), max_tokens=1),
        "the prompt is empty; it must have at least one token.",
    ),
    (
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1, 300, 2]), max_tokens=1),
        "token id 300 at position 1 is not in the vocabulary; ids go from 0 to 299.",
    ),
    (
        router_pb2.GenerateRequest(token_ids=IDS, max_tokens=0),
        "max_tokens is 0; it must be at least 1 (the model's context is 64).",
    ),
    (
        router_pb2.GenerateRequest(token_ids=IDS, max_tokens=-5),
        "max_tokens is -5; it must be at least 1 (the model's context is 64).",
    ),
    (
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1] * 60), max_tokens=8),
        "prompt (60 tokens) and max_tokens (8) make 68, and the model's context is 64. "
        "Lower max_tokens to at most 4, or shorten the prompt.",
    ),
    (
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1] * 64), max_tokens=1),
        "the prompt has 64 tokens, and the model's context is 64 for prompt and answer together. "
        "Shorten the prompt to at most 63 tokens.",
    ),
    (
        router_pb2.GenerateRequest(token_ids=IDS, max_tokens=1, sampling=sampled(temperature=-1)),
        "temperature is -1; it must be 0 (greedy) or more.",
    ),
    (
        router_pb2.GenerateRequest(token_ids=IDS, max_tokens=1, sampling=sampled(temperature=float("nan"))),
        "temperature is nan; it must be 0 (greedy) or more.",
    ),
    (
        router_pb2.GenerateRequest(token_ids=IDS, max_tokens=1, sampling=sampled(temperature=1, top_p=1.5)),
        "top_p is 1.5; it must be in (0, 1], or 0 for the default of 1.",
    ),
    (
        router_pb2.GenerateRequest(token_ids=IDS, max_tokens=1, sampling=sampled(temperature=1, top_p=-0.5)),
        "top_p is -0.5; it must be in (0, 1], or 0 for the default of 1.",
    ),
    (router_pb2.GenerateRequest(token_ids=IDS, max_tokens=1, stop=[""]), "a stop string is empty; leave it out."),
    (
        router_pb2.GenerateRequest(token_ids=IDS, max_tokens=1, request_id="x" * 200),
        "request_id has 200 characters; 128 are allowed.",
    ),
    (
        router_pb2.GenerateRequest(
            chat=router_pb2.Chat(messages=[router_pb2.ChatMessage(role="system", content="x")]), max_tokens=1
        ),
        "the model's chat template refuses the messages: no system prompts",
    ),
]


def test_every_refusal_says_why_and_opens_no_leg() -> None:
    async def run() -> None:
        async with rig([70, 80]) as it:
            for request, message in REFUSED:
                with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
                    await it.answer(request)
            assert it.prefill.requests == []
            assert it.decode.requests == []
            assert kinds(await it.answer(text_request(max_tokens=2)))[-1] == "finished"

    asyncio.run(run())


def test_prompt_larger_than_every_pool() -> None:
    def small(prefill: FakePrefill, _: FakeDecode) -> None:
        prefill.description.capacity_tokens = 8

    async def run() -> None:
        async with rig([70, 80], prepare=small) as it:
            request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1] * 9), max_tokens=2)
            with pytest.raises(InvalidRequest, match=r"room for 9 tokens, and the largest prefill pool .* holds 8"):
                await it.answer(request)
            assert it.decode.requests == []

    asyncio.run(run())


def test_no_group_reachable_names_each() -> None:
    async def run() -> None:
        cluster = parse_cluster("""
            [model]
            path = "unused"
            [router]
            address = "127.0.0.1:0"
            [[prefill]]
            name = "p0"
            address = "127.0.0.1:1"
            [[decode]]
            name = "d0"
            address = "127.0.0.1:2"
            [deadlines]
            pair = 0.1
        """)
        async with running_router(cluster, tiny_model()) as address, AsyncClient(address) as client:
            with pytest.raises(
                PeerUnavailable, match=r"no prefill group is serving: p0 at 127\.0\.0\.1:1: unreachable"
            ):
                async for _ in client.generate(text_request()):
                    pass
            status = await client.status()
            assert [group.state for group in status.groups] == ["unreachable", "unreachable"]

    asyncio.run(run())
