"""Prefill and decode groups without a model: real gRPC servers whose behaviour is a script, and a router over them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

import router
from headwater.client import AsyncClient
from headwater.cluster import Cluster, parse_cluster
from headwater.errors import InvalidRequest
from headwater.rpc import Server
from headwater.tokens import unpack
from headwater.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, router_pb2
from router.request import ServedModel
from router.server import running_router
from router.text import Text

PrefillScript = Callable[[prefill_pb2.PrefillRequest], AsyncGenerator[prefill_pb2.PrefillResponse, None]]
DecodeScript = Callable[[decode_pb2.DecodeRequest], AsyncGenerator[decode_pb2.DecodeResponse, None]]

CHUNK_TOKENS = 4
CONTEXT_TOKENS = 64
VOCABULARY_SIZE = 300
EOS_TEXT = "<|end|>"
# Ends every wait that should have ended long before.
PATIENCE_SECONDS = 30

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system prompts') }}"
    "{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@functools.cache
def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with 300 tokens: id 0 ends a sequence, then every byte, then every beginning of some words.

    Written out rather than trained, so that ids do not depend on the version of `tokenizers`. The beginnings of
    "漢" and "😀" are tokens that are no whole character.
    """
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = {EOS_TEXT: 0}
    for symbol in sorted(byte_level.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for word in (
        "the",
        " the",
        " quick",
        " brown",
        " fox",
        " jumps",
        " over",
        " lazy",
        " dog",
        "漢",
        "😀",
        "字",
        "and",
    ):
        ((symbols, _),) = byte_level.pre_tokenize_str(word)
        for end in range(2, len(symbols) + 1):
            if symbols[:end] not in vocabulary:
                merges.append((symbols[: end - 1], symbols[end - 1]))
                vocabulary[symbols[:end]] = len(vocabulary)
    assert len(vocabulary) == VOCABULARY_SIZE, len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TEXT])
    return tokenizer


def tiny_model() -> ServedModel:
    tokenizer = tiny_tokenizer()
    return ServedModel(
        text=Text(tokenizer, CHAT_TEMPLATE, {}),
        vocab_size=tokenizer.get_vocab_size(),
        max_context_tokens=CONTEXT_TOKENS,
        eos_token_ids=(0,),
        tokenizer_fingerprint="tokenizer",
    )


def tiny_geometry(**changes: str | int) -> common_pb2.Geometry:
    geometry = common_pb2.Geometry(
        model_fingerprint="model",
        weights_fingerprint="weights",
        tokenizer_fingerprint="tokenizer",
        num_layers=2,
        num_kv_heads=1,
        key_size=8,
        value_size=8,
        dtype="float32",
        page_size=4,
        vocab_size=VOCABULARY_SIZE,
        max_context_tokens=CONTEXT_TOKENS,
    )
    for field, value in changes.items():
        setattr(geometry, field, value)
    return geometry


async def never() -> None:
    """Waits until cancelled."""
    await asyncio.Event().wait()


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Plays `script` for every request and remembers what it saw."""

    def __init__(self, answer: list[int], *, capacity_tokens: int = 1024) -> None:
        self.answer = answer
        self.script: PrefillScript = self.run
        self.description = prefill_pb2.DescribePrefillResponse(
            name="p0",
            epoch="first",
            serving=True,
            geometry=tiny_geometry(),
            pp=2,
            tp=1,
            chunk_tokens=CHUNK_TOKENS,
            capacity_tokens=capacity_tokens,
            free_tokens=capacity_tokens,
            transport="memory",
            prefix_cache=prefill_pb2.PrefixCache(),
        )
        self.requests: list[prefill_pb2.PrefillRequest] = []
        # By request.
        self.traces: dict[str, prefill_pb2.TracePrefillResponse] = {}
        self.redirects: asyncio.Queue[prefill_pb2.RedirectRequest] = asyncio.Queue()
        # Of each request.
        self.traceparents: list[str | bytes | None] = []
        # The first token and the KV have left.
        self.delivered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Prefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.requests.append(request)
        self.traceparents.append(dict(context.invocation_metadata() or ()).get("traceparent"))
        try:
            async with contextlib.aclosing(self.script(request)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def Redirect(  # noqa: N802
        self, request: prefill_pb2.RedirectRequest, context: object
    ) -> prefill_pb2.RedirectResponse:
        self.redirects.put_nowait(request)
        return prefill_pb2.RedirectResponse()

    async def DescribePrefill(  # noqa: N802
        self, request: prefill_pb2.DescribePrefillRequest, context: object
    ) -> prefill_pb2.DescribePrefillResponse:
        return self.description

    async def DrainPrefill(  # noqa: N802
        self, request: prefill_pb2.DrainPrefillRequest, context: object
    ) -> prefill_pb2.DrainPrefillResponse:
        self.description.draining, self.description.serving = request.draining, not request.draining
        return prefill_pb2.DrainPrefillResponse()

    async def TracePrefill(  # noqa: N802
        self, request: prefill_pb2.TracePrefillRequest, context: object
    ) -> prefill_pb2.TracePrefillResponse:
        if request.request_id not in self.traces:
            raise InvalidRequest(f"no trace of {request.request_id!r}")
        return self.traces[request.request_id]

    async def run(self, request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """The default script: all goes well."""
        async for response in self.until_first_token(request):
            yield response
        self.delivered.set()
        yield prefill_pb2.PrefillResponse(completed=prefill_pb2.PrefillCompleted(bytes_sent=1, num_receipts=1))

    async def until_first_token(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        num_tokens = len(unpack(request.tokens))
        ends = [*range(CHUNK_TOKENS, num_tokens, CHUNK_TOKENS), num_tokens]
        yield prefill_pb2.PrefillResponse(scheduled=prefill_pb2.PrefillScheduled(num_chunks=len(ends)))
        for end in ends[:-1]:
            yield prefill_pb2.PrefillResponse(chunk_done=prefill_pb2.ChunkDone(token_end=end))
        first_token = prefill_pb2.FirstToken(
            token_id=self.answer[0], queue_seconds=0.001, compute_seconds=0.003, bubble_seconds=0.002
        )
        yield prefill_pb2.PrefillResponse(first_token=first_token)


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """As `FakePrefill`. Its default script commits when `prefill` has delivered."""

    def __init__(
        self, prefill: FakePrefill, reason: common_pb2.FinishReason.ValueType, *, capacity_tokens: int = 1024
    ) -> None:
        self.prefill = prefill
        self.reason = reason
        self.script: DecodeScript = self.run
        self.description = decode_pb2.DescribeDecodeResponse(
            name="d0",
            epoch="first",
            serving=True,
            geometry=tiny_geometry(page_size=16),
            engine="fake",
            capacity_tokens=capacity_tokens,
            free_tokens=capacity_tokens,
            transport="memory",
        )
        self.requests: list[decode_pb2.DecodeRequest] = []
        self.traceparents: list[str | bytes | None] = []
        self.cancelled = asyncio.Event()

    async def Decode(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        self.requests.append(request)
        self.traceparents.append(dict(context.invocation_metadata() or ()).get("traceparent"))
        try:
            async with contextlib.aclosing(self.script(request)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def DescribeDecode(  # noqa: N802
        self, request: decode_pb2.DescribeDecodeRequest, context: object
    ) -> decode_pb2.DescribeDecodeResponse:
        return self.description

    async def DrainDecode(  # noqa: N802
        self, request: decode_pb2.DrainDecodeRequest, context: object
    ) -> decode_pb2.DrainDecodeResponse:
        self.description.draining, self.description.serving = request.draining, not request.draining
        return decode_pb2.DrainDecodeResponse()

    async def run(self, request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """The default script: all goes well."""
        if request.tokens:
            for response in self.alone():
                yield response
            return
        yield self.grant(request)
        await self.prefill.delivered.wait()
        for response in self.after_commit():
            yield response

    @staticmethod
    def grant(request: decode_pb2.DecodeRequest) -> decode_pb2.DecodeResponse:
        return decode_pb2.DecodeResponse(
            grant=common_pb2.Grant(transfer_id=request.transfer_id, attempt=request.attempt)
        )

    def after_commit(self) -> list[decode_pb2.DecodeResponse]:
        return [decode_pb2.DecodeResponse(committed=decode_pb2.Committed(bytes_received=1)), *self.after_first_token()]

    def alone(self) -> list[decode_pb2.DecodeResponse]:
        """Prompt and answer."""
        computed = decode_pb2.PromptComputed(
            token_id=self.prefill.answer[0], queue_seconds=0.001, compute_seconds=0.002
        )
        return [
            decode_pb2.DecodeResponse(admitted=decode_pb2.Admitted()),
            decode_pb2.DecodeResponse(prompt_computed=computed),
            *self.after_first_token(),
        ]

    def after_first_token(self) -> list[decode_pb2.DecodeResponse]:
        answer = self.prefill.answer
        tokens = [decode_pb2.DecodedToken(token_id=token, index=i) for i, token in enumerate(answer) if i > 0]
        finished = decode_pb2.DecodeFinished(reason=self.reason, num_generated_tokens=len(answer))
        return [
            *(decode_pb2.DecodeResponse(token=token) for token in tokens),
            decode_pb2.DecodeResponse(finished=finished),
        ]


@dataclasses.dataclass(frozen=True)
class Rig:
    """A router, one fake group of each role, and a client."""

    client: AsyncClient
    address: str
    prefill: FakePrefill
    decode: FakeDecode
    prefill_server: Server
    decode_server: Server

    async def answer(self, request: router_pb2.GenerateRequest) -> list[router_pb2.GenerateResponse]:
        async with contextlib.aclosing(self.client.generate(request)) as responses:
            return [response async for response in responses]


@dataclasses.dataclass(frozen=True)
class Site:
    """A router over several fake groups of each role."""

    client: AsyncClient
    address: str
    prefill: list[FakePrefill]
    decode: list[FakeDecode]

    async def answer(self, request: router_pb2.GenerateRequest) -> list[router_pb2.GenerateResponse]:
        async with contextlib.aclosing(self.client.generate(request)) as responses:
            return [response async for response in responses]


@contextlib.asynccontextmanager
async def site(
    answer: list[int],
    num_groups: int,
    router_section: str = "",
    *,
    pair_seconds: float = 0.1,
    make_prefill: Callable[[list[int]], FakePrefill] = FakePrefill,
) -> AsyncIterator[Site]:
    """`num_groups` prefill groups p0, p1, … and decode groups d0, d1, …, which answer with `answer`."""
    async with contextlib.AsyncExitStack() as stack:
        prefill = [make_prefill(answer) for _ in range(num_groups)]
        # Whichever prefill group has delivered.
        decode = [FakeDecode(prefill[0], common_pb2.FINISH_REASON_LENGTH) for _ in range(num_groups)]
        file = f'[model]\npath = "unused"\n[router]\naddress = "127.0.0.1:0"\n{router_section}\n'
        for number, (one, other) in enumerate(zip(prefill, decode, strict=True)):
            one.delivered = prefill[0].delivered
            for role, letter, fake, add in (
                ("prefill", "p", one, prefill_pb2_grpc.add_PrefillServiceServicer_to_server),
                ("decode", "d", other, decode_pb2_grpc.add_DecodeServiceServicer_to_server),
            ):
                server = Server("127.0.0.1:0", [])
                add(fake, server.grpc_server)
                await server.start()
                stack.push_async_callback(server.stop, 0)
                file += f'[[{role}]]\nname = "{letter}{number}"\naddress = "{server.address}"\n'
        cluster = parse_cluster(file + f"[deadlines]\nheartbeat = 0.05\npair = {pair_seconds}\n")
        await stack.enter_async_context(asyncio.timeout(PATIENCE_SECONDS))
        address = await stack.enter_async_context(running_router(cluster, tiny_model()))
        client = await stack.enter_async_context(AsyncClient(address))
        yield Site(client, address, prefill, decode)
    assert router_tasks() == []


def router_tasks() -> list[asyncio.Task[object]]:
    """Tasks of this loop whose coroutine is defined in the `router` package."""
    package = str(Path(router.__file__).parent)
    codes = [(task, getattr(task.get_coro(), "cr_code", None)) for task in asyncio.all_tasks()]
    return [task for task, code in codes if code is not None and code.co_filename.startswith(package)]


def cluster_of(prefill_address: str, decode_address: str, reply_seconds: float, router_section: str) -> Cluster:
    return parse_cluster(f"""
        [model]
        path = "unused"
        [router]
        address = "127.0.0.1:0"
        {router_section}
        [[prefill]]
        name = "p0"
        address = "{prefill_address}"
        [[decode]]
        name = "d0"
        address = "{decode_address}"
        [deadlines]
        heartbeat = 0.05
        reply = {reply_seconds}
        pair = 0.1
    """)


@contextlib.asynccontextmanager
async def rig(
    answer: list[int],
    *,
    reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_LENGTH,
    prepare: Callable[[FakePrefill, FakeDecode], None] = lambda _prefill, _decode: None,
    reply_seconds: float = PATIENCE_SECONDS,
    router_section: str = "",
) -> AsyncIterator[Rig]:
    """A running rig whose groups answer with `answer`; checks that the router left no task behind.

    Args:
        prepare: changes the fakes before the router first asks them.
    """
    prefill = FakePrefill(answer)
    decode = FakeDecode(prefill, reason)
    prepare(prefill, decode)
    prefill_server, decode_server = Server("127.0.0.1:0", []), Server("127.0.0.1:0", [])
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, prefill_server.grpc_server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, decode_server.grpc_server)
    await prefill_server.start()
    await decode_server.start()
    cluster = cluster_of(prefill_server.address, decode_server.address, reply_seconds, router_section)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS), running_router(cluster, tiny_model()) as address:
            async with AsyncClient(address) as client:
                yield Rig(client, address, prefill, decode, prefill_server, decode_server)
    finally:
        await prefill_server.stop(0)
        await decode_server.stop(0)
    assert router_tasks() == []


def text_request(text: str = "the quick brown fox jumps", max_tokens: int = 4) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(text=text, max_tokens=max_tokens)


def kinds(responses: list[router_pb2.GenerateResponse]) -> list[str]:
    return [str(response.WhichOneof("event")) for response in responses]
