"""A client of the router, for programs and for the `headwater` command itself.

    with Client("127.0.0.1:7000") as client:
        print(client.complete("Why is the sky blue?", max_tokens=50).text)
        for event in client.generate(prompt_request([1, 2, 3], max_tokens=5)):
            ...

`AsyncClient` is the same on asyncio. Every method raises the HeadwaterError that the router reports, or PeerUnavailable
when there is no router. Closing an iterator, or leaving it early, cancels the request.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Generator, Sequence
from types import TracebackType
from typing import Self

import grpc

from headwater import tracing
from headwater.cluster import Deadlines
from headwater.errors import from_rpc_error
from headwater.rpc import authorization, open_blocking_channel, open_channel
from headwater.v1 import common_pb2, router_pb2, router_pb2_grpc

_REPLY_SECONDS = Deadlines().reply

# A text, token ids, or a chat as pairs of role and content.
Prompt = str | Sequence[int] | Sequence[tuple[str, str]]


def prompt_request(
    prompt: Prompt,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    priority: int = 0,
    request_id: str = "",
) -> router_pb2.GenerateRequest:
    """A request. The fields are those of GenerateRequest; without a seed the router draws one.

    Raises:
        ValueError: a number is out of the range that its field has.
    """
    request = router_pb2.GenerateRequest(
        max_tokens=max_tokens,
        sampling=common_pb2.SamplingParams(temperature=temperature, top_p=top_p, seed=seed or 0),
        has_seed=seed is not None,
        stop=stop,
        ignore_eos=ignore_eos,
        priority=priority,
        request_id=request_id,
    )
    if isinstance(prompt, str):
        request.text = prompt
        return request
    request.token_ids.SetInParent()
    for part in prompt:
        if isinstance(part, int):
            request.token_ids.ids.append(part)
        else:
            role, content = part
            request.chat.messages.add(role=role, content=content)
    return request


@dataclasses.dataclass
class Answer:
    """What came of a request, put together from its events."""

    accepted: router_pb2.Accepted = dataclasses.field(default_factory=router_pb2.Accepted)
    finished: router_pb2.Finished = dataclasses.field(default_factory=router_pb2.Finished)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""

    @property
    def reason(self) -> str:
        """Why it ended: "eos", "length" or "stop"."""
        return common_pb2.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_").lower()

    def add(self, event: router_pb2.GenerateResponse) -> str:
        """Takes the next event. Returns the text that it brought."""
        text = ""
        match event.WhichOneof("event"):
            case "accepted":
                self.accepted = event.accepted
            case "token":
                self.token_ids.append(event.token.id)
                text = event.token.text
            case "finished":
                self.finished = event.finished
                text = event.finished.text
        self.text += text
        return text


class Client:
    """One channel to a router, for threads.

    Args:
        address: "host:port".
        token: of the router's API; None: this process's (`headwater.security`), if it has one.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self._metadata = authorization(token)
        self._peer = f"router at {address}"
        self._channel = open_blocking_channel(address)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def generate(self, request: router_pb2.GenerateRequest) -> Generator[router_pb2.GenerateResponse, None, None]:
        """The answer's events as they come."""
        call = self._stub.Generate(request, metadata=(*self._metadata, *tracing.metadata()))
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._peer) from error
        finally:
            call.cancel()

    def complete(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The whole answer to a prompt, without sampling; `generate` has more to choose."""
        answer = Answer()
        for event in self.generate(prompt_request(prompt, max_tokens)):
            answer.add(event)
        return answer

    def status(self) -> router_pb2.StatusResponse:
        """What the router knows of its groups."""
        with _as_headwater_error(self._peer):
            return self._stub.Status(router_pb2.StatusRequest(), timeout=_REPLY_SECONDS, metadata=self._metadata)

    def drain(self, group: str, *, draining: bool) -> None:
        """Has a group refuse new requests, or take them again; what runs there goes on."""
        with _as_headwater_error(self._peer):
            self._stub.Drain(
                router_pb2.DrainRequest(group=group, draining=draining),
                timeout=2 * _REPLY_SECONDS,
                metadata=self._metadata,
            )

    def cancel(self, request_id: str) -> None:
        """Ends a running request."""
        with _as_headwater_error(self._peer):
            self._stub.Cancel(
                router_pb2.CancelRequest(request_id=request_id), timeout=_REPLY_SECONDS, metadata=self._metadata
            )


class AsyncClient:
    """One channel to a router, on asyncio. See `Client`."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._metadata = authorization(token)
        self._peer = f"router at {address}"
        self._channel = open_channel(address)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def generate(self, request: router_pb2.GenerateRequest) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        """The answer's events as they come."""
        call = self._stub.Generate(request, metadata=(*self._metadata, *tracing.metadata()))
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._peer) from error
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The whole answer to a prompt, without sampling; `generate` has more to choose."""
        answer = Answer()
        async with contextlib.aclosing(self.generate(prompt_request(prompt, max_tokens))) as events:
            async for event in events:
                answer.add(event)
        return answer

    async def status(self) -> router_pb2.StatusResponse:
        """What the router knows of its groups."""
        with _as_headwater_error(self._peer):
            return await self._stub.Status(router_pb2.StatusRequest(), timeout=_REPLY_SECONDS, metadata=self._metadata)

    async def drain(self, group: str, *, draining: bool) -> None:
        """Has a group refuse new requests, or take them again; what runs there goes on."""
        with _as_headwater_error(self._peer):
            await self._stub.Drain(
                router_pb2.DrainRequest(group=group, draining=draining),
                timeout=2 * _REPLY_SECONDS,
                metadata=self._metadata,
            )

    async def cancel(self, request_id: str) -> None:
        """Ends a running request."""
        with _as_headwater_error(self._peer):
            await self._stub.Cancel(
                router_pb2.CancelRequest(request_id=request_id), timeout=_REPLY_SECONDS, metadata=self._metadata
            )


@contextlib.contextmanager
def _as_headwater_error(peer: str) -> Generator[None, None, None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, peer) from error
