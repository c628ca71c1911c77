"""The decode node: `DecodeService` over the receiver and the decoder, or over the decoder alone for short prompts.

Admission counts promised tokens (prompt and answer). A request's KV memory belongs to it from the grant until
its writers have closed and the decoder has let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from headwater import tracing
from headwater.cluster import Cluster, Deadlines, Decode
from headwater.errors import CapacityError, HeadwaterError, InvalidRequest, PeerUnavailable
from headwater.lifecycle import Event, get_logger
from headwater.membership import registered
from headwater.rpc import Server
from headwater.stopping import Stopping
from headwater.tokens import TOKEN_BYTES, unpack
from headwater.v1 import common_pb2, decode_pb2, decode_pb2_grpc, router_pb2, transfer_pb2_grpc
from kv_transfer import metrics
from kv_transfer.connectors.decoder import Continuation, Decoder
from kv_transfer.connectors.ragged import RequestKv
from kv_transfer.geometry import check_contract, geometry_of
from kv_transfer.incoming import Delivery
from kv_transfer.metrics_server import MetricsServer
from kv_transfer.model_folder import read_model_folder
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.receiver import Receiver, ReceiverOptions, TransferServicer
from kv_transfer.slots import SlotArena
from kv_transfer.writer import Writer

log = get_logger(__name__)


class DecodeNode(decode_pb2_grpc.DecodeServiceServicer):
    """`DecodeService`. Used from one event loop."""

    def __init__(
        self,
        section: Decode,
        deadlines: Deadlines,
        geometry: common_pb2.Geometry,
        epoch: str,
        receiver: Receiver,
        arena: SlotArena,
        decoder: Decoder,
        *,
        transport: str,
        metrics_address: str,
    ) -> None:
        self._section = section
        self._deadlines = deadlines
        self._geometry = geometry
        self._epoch = epoch
        self._receiver = receiver
        self._arena = arena
        self._decoder = decoder
        self._transport = transport
        self._metrics_address = metrics_address
        self._promised_tokens = 0
        self._active = 0
        # No new requests are taken.
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        for state in ("free", "held", "quarantined"):
            metrics.SLOTS.labels(state).set_function(lambda name=state: getattr(arena, name))  # type: ignore[misc]
        metrics.DECODE_CAPACITY.set(section.capacity_tokens)
        metrics.DECODE_PROMISED.set_function(lambda: self._promised_tokens)
        metrics.DECODE_ACTIVE.set_function(lambda: self._active)

    async def Decode(  # noqa: N802 - gRPC's name
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        parent = tracing.caller(context)
        with self._admitted(request) as capacity:
            kv = RequestKv(self._geometry, capacity)
            if request.tokens:
                async with contextlib.aclosing(self._answer(request, kv, parent)) as responses:
                    async for response in responses:
                        yield response
                return
            with tracing.within(parent):
                incoming = self._receiver.expect(
                    request.transfer_id,
                    request.attempt,
                    request.num_prompt_tokens,
                    kv,
                    source_dtype=request.source.dtype,
                )
            try:
                yield decode_pb2.DecodeResponse(grant=self._receiver.grant(incoming))
                delivery: Delivery | None = None
                async with contextlib.aclosing(incoming.changes()) as changes:
                    async for change in changes:
                        if isinstance(change, Delivery):
                            delivery = change
                        else:
                            suspended = decode_pb2.Suspended(
                                attempt=change.attempt, verified_tokens=change.verified_tokens, reason=change.reason
                            )
                            yield decode_pb2.DecodeResponse(suspended=suspended)
                assert delivery is not None
                committed = decode_pb2.Committed(bytes_received=delivery.num_bytes, transfer_seconds=delivery.seconds)
                yield decode_pb2.DecodeResponse(committed=committed)
                answer = self._traced(request, kv, delivery.first_token, parent)
                async with contextlib.aclosing(answer) as responses:
                    async for response in responses:
                        yield response
            finally:
                # Until the writers have closed, bytes may still be put into `kv`.
                await incoming.abort("the decode request ended", self._deadlines.stop)
                kv.close()
                if self._receiver.open_transfers == 0:
                    self._arena.check()

    async def _answer(
        self, request: decode_pb2.DecodeRequest, kv: RequestKv, parent: Context
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """Prompt and answer, all here."""
        try:
            yield decode_pb2.DecodeResponse(admitted=decode_pb2.Admitted())
            async with contextlib.aclosing(self._traced(request, kv, None, parent)) as responses:
                async for response in responses:
                    yield response
        finally:
            kv.close()

    async def Regrant(  # noqa: N802 - gRPC's name
        self, request: decode_pb2.RegrantRequest, context: object
    ) -> decode_pb2.RegrantResponse:
        grant = await self._receiver.regrant(request.transfer_id, request.attempt)
        return decode_pb2.RegrantResponse(grant=grant)

    async def DrainDecode(  # noqa: N802 - gRPC's name
        self, request: decode_pb2.DrainDecodeRequest, context: object
    ) -> decode_pb2.DrainDecodeResponse:
        log.info("draining" if request.draining else "taking requests again")
        self.draining = request.draining
        return decode_pb2.DrainDecodeResponse()

    async def DescribeDecode(  # noqa: N802 - gRPC's name
        self, request: decode_pb2.DescribeDecodeRequest, context: object
    ) -> decode_pb2.DescribeDecodeResponse:
        return decode_pb2.DescribeDecodeResponse(
            name=self._section.name,
            epoch=self._epoch,
            serving=not self.draining,
            draining=self.draining,
            detail="draining" if self.draining else "",
            geometry=self._geometry,
            engine="transformers",
            capacity_tokens=self._section.capacity_tokens,
            free_tokens=self._section.capacity_tokens - self._promised_tokens,
            active_requests=self._active,
            transport=self._transport,
            metrics_addresses=[self._metrics_address],
            slots_free=self._arena.free,
            slots_held=self._arena.held,
            slots_quarantined=self._arena.quarantined,
            prefills=True,
        )

    @contextlib.contextmanager
    def _admitted(self, request: decode_pb2.DecodeRequest) -> Iterator[int]:
        """Promises the request its tokens for as long as it lasts. Gives their number."""
        if self.draining:
            raise PeerUnavailable("the decode node is draining: it takes no new requests; use another one.")
        if request.tokens:
            self._check_prompt(request)
        else:
            check_contract(request.source, self._geometry)
        promised = request.num_prompt_tokens + request.stop.max_tokens
        capacity = self._section.capacity_tokens
        if not request.num_prompt_tokens or not request.stop.max_tokens:
            raise InvalidRequest("num_prompt_tokens and stop.max_tokens must be given, and not be 0.")
        if not request.tokens and not request.transfer_id:
            raise InvalidRequest("give a transfer_id, or the prompt's tokens.")
        if promised > capacity:
            raise InvalidRequest(
                f"{request.num_prompt_tokens} prompt tokens and {request.stop.max_tokens} to generate are {promised}; "
                f"decode node {self._section.name} holds {capacity}. Shorten them, or raise capacity_tokens."
            )
        if promised > capacity - self._promised_tokens or self._active >= self._section.max_requests:
            raise CapacityError(
                f"decode node {self._section.name} is full: {self._promised_tokens} of {capacity} tokens are promised "
                f"to {self._active} requests (at most {self._section.max_requests}). Try again later or add a node."
            )
        self._promised_tokens += promised
        self._active += 1
        self.idle.clear()
        try:
            yield promised
        finally:
            self._promised_tokens -= promised
            self._active -= 1
            if not self._active:
                self.idle.set()

    def _check_prompt(self, request: decode_pb2.DecodeRequest) -> None:
        if len(request.tokens) != TOKEN_BYTES * request.num_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {len(request.tokens)} bytes, and num_prompt_tokens is {request.num_prompt_tokens}; a "
                f"token has {TOKEN_BYTES}."
            )
        largest = max(unpack(request.tokens))
        if largest >= self._geometry.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is out of the vocabulary (0 to {self._geometry.vocab_size - 1}). "
                "Tokenise with this model's tokenizer."
            )

    async def _traced(
        self, request: decode_pb2.DecodeRequest, kv: RequestKv, first_token: int | None, parent: Context
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """`_continue` under a span of its own."""
        attributes = tracing.rpc("DecodeService/Decode") | {
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "headwater.request.id": request.request_id,
            "headwater.transfer.id": request.transfer_id,
        }
        with tracing.span("decode", attributes, kind=SpanKind.SERVER, parent=parent) as span:
            async with contextlib.aclosing(self._continue(request, kv, first_token)) as responses:
                async for response in responses:
                    if response.HasField("finished"):
                        span.set_attribute("gen_ai.usage.output_tokens", response.finished.num_generated_tokens)
                    yield response

    async def _continue(
        self, request: decode_pb2.DecodeRequest, kv: RequestKv, first_token: int | None
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """The tokens after the first one, and the end. Without a first token: the prompt's computing before."""
        begin = time.monotonic()
        generated = [] if first_token is None else [first_token]
        reason = self._decoder.finish_reason(generated, request.stop) if generated else None
        num_tokens = len(generated)
        if reason is None:
            loop = asyncio.get_running_loop()
            tokens: asyncio.Queue[tuple[int, common_pb2.FinishReason.ValueType | None] | Exception] = asyncio.Queue()
            left = asyncio.Event()

            def put(item: tuple[int, common_pb2.FinishReason.ValueType | None] | Exception) -> None:
                loop.call_soon_threadsafe(tokens.put_nowait, item)

            def leave() -> None:
                loop.call_soon_threadsafe(left.set)

            continuation = Continuation(
                kv=kv,
                num_prompt_tokens=request.num_prompt_tokens,
                tokens=generated,
                sampling=request.sampling,
                stop=request.stop,
                on_token=lambda token, why: put((token, why)),
                on_error=put,
                on_left=leave,
                prompt=unpack(request.tokens),
            )
            log.event(Event.DECODE_STARTED, request=request.request_id, transfer=request.transfer_id)
            self._decoder.add(continuation)
            try:
                while reason is None:
                    item = await tokens.get()
                    if isinstance(item, Exception):
                        raise HeadwaterError(f"decode node {self._section.name}: the model failed: {item}") from item
                    token, reason = item
                    metrics.TOKENS_DECODED.inc()
                    if num_tokens:
                        yield decode_pb2.DecodeResponse(token=decode_pb2.DecodedToken(token_id=token, index=num_tokens))
                    else:
                        log.event(Event.FIRST_TOKEN_SAMPLED, request=request.request_id, token=token)
                        computed = decode_pb2.PromptComputed(
                            token_id=token,
                            queue_seconds=continuation.begun_at - begin,
                            compute_seconds=time.monotonic() - continuation.begun_at,
                        )
                        yield decode_pb2.DecodeResponse(prompt_computed=computed)
                    num_tokens += 1
            finally:
                self._decoder.remove(continuation)
                # One step of the decoder at most.
                await left.wait()
        finished = decode_pb2.DecodeFinished(reason=reason, num_generated_tokens=num_tokens)
        yield decode_pb2.DecodeResponse(finished=finished)
        log.event(Event.FINISHED, request=request.request_id, transfer=request.transfer_id, tokens=num_tokens)


async def serve(cluster: Cluster, name: str) -> int:
    """Runs the decode node `name` until SIGTERM or SIGINT. Returns the exit code.

    Raises:
        InvalidConfig, ModelFolderError: before anything is started.
    """
    section = cluster.decode_named(name)
    folder = read_model_folder(Path(cluster.model.path))
    # Its pages are the requests themselves, so any page size of the writer will do.
    geometry = geometry_of(folder, cluster.model, page_size=1, dtype=section.dtype)
    host = section.address.rpartition(":")[0]
    stopping = Stopping()
    async with contextlib.AsyncExitStack() as stack:
        # Claims the port before the slow part.
        server = Server(section.address, ["headwater.v1.DecodeService", "headwater.v1.TransferService"])
        exporter = MetricsServer(
            host,
            section.metrics_port,
            role="decode",
            node=name,
            config={
                "delivery": section.delivery,
                "wire_dtype": section.wire_dtype,
                "digests": section.digests,
                "capacity_tokens": section.capacity_tokens,
            },
        )
        stack.callback(exporter.stop)
        engine = MooncakeEngine(host, section.transport, cluster.deadlines.write)
        stack.callback(engine.close)
        arena = SlotArena(engine, section.num_slots, section.slot_kb * 1024)
        stack.callback(arena.close)
        writer = Writer(
            engine,
            write_seconds=cluster.deadlines.write,
            max_bytes_in_flight=section.num_slots * section.slot_kb * 1024,
        )
        stack.callback(writer.close)
        epoch = secrets.token_hex(8)
        receiver = Receiver(
            engine,
            arena,
            writer,
            epoch=epoch,
            address=server.address,
            geometry=geometry,
            options=ReceiverOptions(
                slots_per_writer=section.slots_per_writer,
                reply_seconds=cluster.deadlines.reply,
                acknowledge_seconds=cluster.deadlines.acknowledge,
                stop_seconds=cluster.deadlines.stop,
                lease_seconds=cluster.deadlines.lease,
                resume_seconds=cluster.deadlines.resume,
                wire_dtype=section.wire_dtype,
                direct=section.delivery == "direct",
                digests=section.digests,
            ),
        )
        stack.push_async_callback(receiver.close)
        decoder = await asyncio.to_thread(
            Decoder,
            folder.path,
            dtype=geometry.dtype,
            max_context_tokens=cluster.model.max_context_tokens,
            num_threads=section.threads,
            core=section.cores[0] if section.cores else None,
        )
        stack.callback(decoder.stop)
        node = DecodeNode(
            section,
            cluster.deadlines,
            geometry,
            epoch,
            receiver,
            arena,
            decoder,
            transport=engine.transport,
            metrics_address=exporter.address,
        )
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(node, server.grpc_server)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(TransferServicer(receiver), server.grpc_server)
        await server.start()
        stack.push_async_callback(server.stop, cluster.deadlines.stop)
        await server.set_serving(serving=True)
        log.info("serving", address=server.address, metrics=exporter.address, transport=engine.transport)
        where = router_pb2.RegisterRequest(name=name, role="decode", address=server.address)
        async with registered(cluster.routers, where):
            await stopping.asked.wait()
            node.draining = True
            await server.set_serving(serving=False)
            await stopping.drain(node.idle.wait(), cluster.deadlines.drain)
        # The stack ends calls that still run first, then what they use.
    return 0
