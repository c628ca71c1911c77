"""A decode group that is lost after the commit: real gRPC, groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from headwater.errors import CapacityError, HeadwaterError, PeerUnavailable, StalePeer, TransferFailed
from headwater.v1 import decode_pb2, prefill_pb2, router_pb2
from tests.router.fakes import FakeDecode, FakePrefill, Site, kinds, site, text_request

ANSWER = [70, 80, 90, 100]


class Migration:
    """The first decode group that is asked is lost after the commit, when the client has three tokens. The prefill leg
    ends when `released` is set.

    Args:
        answer: what the second one decodes; an error: why it does not.
    """

    def __init__(self, it: Site, answer: list[int] | HeadwaterError = ANSWER) -> None:
        self.it = it
        self.answer = answer
        self.released = asyncio.Event()
        self.completed = asyncio.Event()
        self.client_has_three = asyncio.Event()
        self.requests: list[decode_pb2.DecodeRequest] = []
        self.redirects: list[prefill_pb2.RedirectRequest] = []
        # The second one was cancelled before it had the KV.
        self.given_up = asyncio.Event()
        for prefill in it.prefill:
            self._follow(prefill)
        for decode in it.decode:
            decode.script = self._decode

    def _follow(self, group: FakePrefill) -> None:
        async def script(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
            async for response in group.until_first_token(request):
                yield response
            group.delivered.set()
            await self.released.wait()
            yield prefill_pb2.PrefillResponse(completed=prefill_pb2.PrefillCompleted())
            self.completed.set()

        group.script = script

    async def _decode(self, request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        self.requests.append(request)
        if len(self.requests) == 1:
            yield FakeDecode.grant(request)
            await self.it.prefill[0].delivered.wait()
            for response in self.it.decode[0].after_commit()[:3]:
                yield response
            await self.client_has_three.wait()
            raise PeerUnavailable("d is gone")
        if isinstance(self.answer, HeadwaterError):
            raise self.answer
        yield FakeDecode.grant(request)
        try:
            self.redirects.append(await self._redirect())
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        yield decode_pb2.DecodeResponse(committed=decode_pb2.Committed())
        for index, token in enumerate(self.answer[1:], 1):
            yield decode_pb2.DecodeResponse(token=decode_pb2.DecodedToken(token_id=token, index=index))
        yield decode_pb2.DecodeResponse(
            finished=decode_pb2.DecodeFinished(reason=self.it.decode[0].reason, num_generated_tokens=len(self.answer))
        )
        self.released.set()

    async def _redirect(self) -> prefill_pb2.RedirectRequest:
        """The one that comes to whichever prefill group has the request."""
        waiting = [asyncio.ensure_future(group.redirects.get()) for group in self.it.prefill]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for one in waiting:
                one.cancel()

    async def ask(self) -> list[router_pb2.GenerateResponse]:
        """What the client was sent, up to the end of the stream, which may be an error."""
        seen: list[router_pb2.GenerateResponse] = []
        self.seen = seen
        async with contextlib.aclosing(self.it.client.generate(text_request())) as responses:
            async for response in responses:
                seen.append(response)
                if kinds(seen).count("token") == 3 and not self.client_has_three.is_set():
                    await self.before_the_loss()
                    self.client_has_three.set()
        return seen

    async def before_the_loss(self) -> None:
        """More that happens before."""

    def tokens(self) -> list[tuple[int, int]]:
        return [(response.token.index, response.token.id) for response in self.seen if response.HasField("token")]


def test_s16_the_kv_goes_to_another_group_which_decodes_from_token_one() -> None:
    async def run() -> None:
        async with site(ANSWER, 2) as it:
            migration = Migration(it)
            responses = await migration.ask()
            assert migration.tokens() == list(enumerate(ANSWER))
            assert kinds(responses)[-1] == "finished"
            assert responses[-1].finished.num_generated_tokens == len(ANSWER)
            assert kinds(responses).count("accepted") == 1
            first, second = migration.requests
            assert (first.transfer_id, first.attempt) == (second.transfer_id, 1)
            assert (second.attempt, second.sampling.seed) == (2, first.sampling.seed)
            (redirect,) = migration.redirects
            assert (redirect.grant.transfer_id, redirect.grant.attempt) == (first.transfer_id, 2)
            assert [len(group.requests) for group in it.decode] == [1, 1]
            await migration.completed.wait()

    asyncio.run(run())


def test_without_kv_the_loss_is_told() -> None:
    class Released(Migration):
        async def before_the_loss(self) -> None:
            self.released.set()
            await self.completed.wait()

    async def run() -> None:
        async with site(ANSWER, 2) as it:
            migration = Released(it)
            with pytest.raises(PeerUnavailable, match="^d is gone$"):
                await migration.ask()
            assert migration.tokens() == list(enumerate(ANSWER[:3]))
            assert len(migration.requests) == 1

    asyncio.run(run())


def test_when_the_prefill_group_has_let_go_meanwhile_the_loss_is_told() -> None:
    class LetGo(FakePrefill):
        async def Redirect(  # noqa: N802 - gRPC's name
            self, request: prefill_pb2.RedirectRequest, context: object
        ) -> prefill_pb2.RedirectResponse:
            raise StalePeer("it is over")

    async def run() -> None:
        async with site(ANSWER, 2, make_prefill=LetGo) as it:
            migration = Migration(it)
            with pytest.raises(PeerUnavailable, match="^d is gone$"):
                await migration.ask()
            await migration.given_up.wait()

    asyncio.run(run())


def test_when_the_other_group_is_full_the_loss_is_told() -> None:
    async def run() -> None:
        async with site(ANSWER, 2) as it:
            migration = Migration(it, CapacityError("d is full"))
            with pytest.raises(PeerUnavailable, match="^d is gone$"):
                await migration.ask()
            assert len(migration.requests) == 2
            assert migration.redirects == []

    asyncio.run(run())


def test_an_answer_that_would_go_on_differently_fails() -> None:
    async def run() -> None:
        async with site(ANSWER, 2) as it:
            migration = Migration(it, [70, 80, 91, 100])
            with pytest.raises(TransferFailed, match="its token 2 is 91 there, and 90 was sent"):
                await migration.ask()
            assert migration.tokens() == list(enumerate(ANSWER[:3]))

    asyncio.run(run())
