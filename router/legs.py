"""The two legs of one request, prefill and decode: opened in order, coupled while they run, ended together.

Whatever ends one leg before its time ends the other at once: the calls are cancelled, and the groups do
the rest. No wait here needs a deadline of its own but the grant and the end: a peer that dies silently ends
its call by keep-alive (`headwater.rpc`), and a step or a delivery that hangs is ended by the group whose
deadline it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Protocol

from headwater.cluster import Deadlines
from headwater.errors import DeadlinePassed, HeadwaterError, PeerUnavailable, StalePeer
from headwater.lifecycle import Event, Logger
from headwater.v1 import common_pb2, decode_pb2, prefill_pb2, router_pb2
from router import metrics
from router.answer import Answer
from router.pairing import Pair
from router.request import Job
from router.snapshot import DecodeGroup, Snapshot
from router.ttft import Timeline

# Until a failed request is tried again on another pair.
_ATTEMPT = 1


class Peers(Protocol):
    """What a flow needs of `router.peers.Peers`."""

    def prefill(
        self, name: str, request: prefill_pb2.PrefillRequest
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[prefill_pb2.PrefillResponse]]: ...

    def decode(
        self, name: str, request: decode_pb2.DecodeRequest
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[decode_pb2.DecodeResponse]]: ...


class Groups(Protocol):
    """What a flow needs of `router.registry.Registry`."""

    def snapshot(self) -> Snapshot: ...

    def refresh(self, name: str) -> None: ...

    def dispatched(self, name: str) -> contextlib.AbstractContextManager[None]: ...


class Legs:
    """Runs one request on one pair."""

    def __init__(
        self,
        peers: Peers,
        groups: Groups,
        deadlines: Deadlines,
        pair: Pair,
        job: Job,
        transfer_id: str,
        answer: Answer,
        timeline: Timeline,
        log: Logger,
    ) -> None:
        self._peers = peers
        self._groups = groups
        self._deadlines = deadlines
        self._pair = pair
        self._job = job
        self._transfer_id = transfer_id
        self._answer = answer
        self._timeline = timeline
        self._log = log
        self._ending = asyncio.timeout(None)

    async def run(self) -> None:
        """Returns when both legs have ended, which is after the client has its answer: prefill still quiesces.

        Raises:
            HeadwaterError: a leg failed before the answer was complete; the other was cancelled.
        """
        try:
            async with self._ending:
                await self._run()
        except TimeoutError:
            self._log.warning(
                "a leg did not end after the answer was complete; it was cancelled",
                deadline="deadlines.stop",
                seconds=self._deadlines.stop,
            )
        except (HeadwaterError, BaseExceptionGroup) as raised:
            error = _cause(raised)
            if not (self._answer.finished and isinstance(error, HeadwaterError)):
                raise error from None
            self._log.warning("a leg failed after the answer was complete", error=str(error))

    async def _run(self) -> None:
        decode = self._pair.decode
        if decode is None:
            self._paired()
            await self._prefill(None)
            return
        request = decode_pb2.DecodeRequest(
            request_id=self._job.request_id,
            transfer_id=self._transfer_id,
            attempt=_ATTEMPT,
            num_prompt_tokens=len(self._job.token_ids),
            sampling=self._job.sampling,
            stop=self._job.stop,
            source=self._pair.prefill.description.geometry if self._pair.prefill.description else None,
        )
        with self._groups.dispatched(decode.name):
            async with self._peers.decode(decode.name, request) as events:
                grant = await self._grant(decode, events)
                self._paired()
                async with asyncio.TaskGroup() as legs:
                    legs.create_task(self._prefill(grant))
                    legs.create_task(self._decode(decode, events))

    async def _grant(self, decode: DecodeGroup, events: AsyncIterator[decode_pb2.DecodeResponse]) -> common_pb2.Grant:
        try:
            async with asyncio.timeout(self._deadlines.reply):
                first = await anext(events, decode_pb2.DecodeResponse())
        except TimeoutError:
            seconds = self._deadlines.reply
            raise DeadlinePassed(f"decode {decode}: no grant within deadlines.reply = {seconds:g} s.") from None
        if not first.HasField("grant"):
            raise PeerUnavailable(f"decode {decode} neither granted nor refused the request; see its log.")
        if (first.grant.transfer_id, first.grant.attempt) != (self._transfer_id, _ATTEMPT):
            raise StalePeer(f"decode {decode} granted transfer {first.grant.transfer_id!r}, not {self._transfer_id!r}.")
        return first.grant

    def _paired(self) -> None:
        self._timeline.paired = time.monotonic()
        decode = self._pair.decode.name if self._pair.decode else ""
        self._log.event(Event.PAIRED, prefill=self._pair.prefill.name, decode=decode)

    async def _prefill(self, grant: common_pb2.Grant | None) -> None:
        """The prefill leg. Without a grant it gives the whole answer, one token."""
        group = self._pair.prefill
        request = prefill_pb2.PrefillRequest(
            request_id=self._job.request_id, token_ids=self._job.token_ids, sampling=self._job.sampling, grant=grant
        )
        metrics.PROMPT_TOKENS.inc(len(self._job.token_ids))
        completed = False
        with self._groups.dispatched(group.name):
            async with self._peers.prefill(group.name, request) as events:
                await self._answer.accept(self._accepted())
                async for event in events:
                    match event.WhichOneof("event"):
                        case "chunk_done":
                            await self._answer.progress(event.chunk_done.token_end)
                        case "first_token":
                            await self._answer.first_token(event.first_token)
                            if grant is None:
                                await self._finish(self._answer.reason_after_one_token(event.first_token.token_id))
                        case "completed":
                            completed = True
        if not (completed and self._answer.has_first_token):
            raise PeerUnavailable(f"prefill {group} ended its stream before it was done; see its log.")

    async def _decode(self, group: DecodeGroup, events: AsyncIterator[decode_pb2.DecodeResponse]) -> None:
        """The decode leg, from its grant on."""
        async for event in events:
            match event.WhichOneof("event"):
                case "committed":
                    self._answer.committed()
                case "token":
                    await self._answer.token(event.token.token_id)
                case "finished":
                    await self._finish(event.finished.reason)
        if not self._answer.finished:
            raise PeerUnavailable(f"decode {group} ended its stream before it was done; see its log.")

    async def _finish(self, reason: common_pb2.FinishReason.ValueType) -> None:
        await self._answer.finish(reason)
        self._ending.reschedule(asyncio.get_running_loop().time() + self._deadlines.stop)

    def _accepted(self) -> router_pb2.Accepted:
        num_tokens = len(self._job.token_ids)
        chunk_tokens = self._pair.prefill.description.chunk_tokens if self._pair.prefill.description else 0
        return router_pb2.Accepted(
            request_id=self._job.request_id,
            transfer_id=self._transfer_id if self._pair.decode else "",
            prefill_group=self._pair.prefill.name,
            decode_group=self._pair.decode.name if self._pair.decode else "",
            num_prompt_tokens=num_tokens,
            num_chunks=-(-num_tokens // (chunk_tokens or num_tokens)),
            seed=self._job.sampling.seed,
        )


def _cause(raised: BaseException) -> BaseException:
    """What made a task group end: a defect before a typed error, and the first of several."""
    if not isinstance(raised, BaseExceptionGroup):
        return raised
    causes = [_cause(member) for member in raised.exceptions]
    return next((cause for cause in causes if not isinstance(cause, HeadwaterError)), causes[0])
