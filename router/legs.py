"""The two legs of one request, prefill and decode: opened in order, coupled while they run, ended together.

Whatever ends one leg before its time ends the other at once: the calls are cancelled, and the groups do
the rest. But when a group is lost while the KV is on its way, the other one keeps what it has for a while
(`deadlines.resume`), and a third may take the lost one's place as the next attempt of the transfer:

- prefill lost: the decode node grants the rest, and another prefill group goes on from the last verified chunk;
- decode lost: another decode node grants anew, and the prefill group sends from the pages that it still holds. After
  the commit that is as long as the prefill leg has not completed. The new node decodes from token 1, and what the
  client has is not sent again: a draw depends on the seed and the token's position only.

No wait here needs a deadline of its own but the grant and the end: a peer that dies silently ends
its call by keep-alive (`headwater.rpc`), and a step or a delivery that hangs is ended by the group whose
deadline it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from headwater.cluster import Deadlines
from headwater.errors import CapacityError, HeadwaterError, PeerError, PeerUnavailable, StalePeer
from headwater.lifecycle import Event, Logger
from headwater.v1 import common_pb2, decode_pb2, prefill_pb2, router_pb2
from router import metrics
from router.answer import Answer
from router.leg import Groups, Peers, first_response, note_lost
from router.pairing import Pair, Size
from router.request import Job
from router.snapshot import DecodeGroup, Loss, PrefillGroup, Snapshot
from router.ttft import Timeline

_MOST_ATTEMPTS = 3


class Legs:
    """Runs one request on one pair.

    Args:
        choose: the pair for what is left of the groups.
        on_admitted: told when the decode group has granted, and prefill is asked.
        request_id: by which the groups know this try of the request.
    """

    def __init__(
        self,
        peers: Peers,
        groups: Groups,
        deadlines: Deadlines,
        choose: Callable[[Snapshot, Size], Pair],
        on_admitted: Callable[[], None],
        pair: Pair,
        job: Job,
        request_id: str,
        transfer_id: str,
        answer: Answer,
        timeline: Timeline,
        log: Logger,
    ) -> None:
        self._peers = peers
        self._groups = groups
        self._deadlines = deadlines
        self._choose = choose
        self._on_admitted = on_admitted
        self._pair = pair
        self._job = job
        self._size = Size(job.num_tokens, job.stop.max_tokens)
        self._request_id = request_id
        self._transfer_id = transfer_id
        self._answer = answer
        self._timeline = timeline
        self._log = log
        self._ending = asyncio.timeout(None)
        self._attempt = 1
        # The group of each leg as it is now, and those that were lost.
        self._prefill_group = pair.prefill
        self._decode_group = pair.decode
        self.lost: dict[str, Loss] = {}
        # Prefill has been asked for, and has not completed.
        self._prefilling = False
        # One change of groups at a time.
        self._changing = asyncio.Lock()

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
        except HeadwaterError as error:
            if not self._answer.finished:
                raise
            self._log.warning("a leg failed after the answer was complete", error=str(error))

    async def _run(self) -> None:
        decode = self._pair.decode
        self._log.event(Event.PAIRED, prefill=self._pair.prefill.name, decode=decode.name if decode else "")
        self._answer.record.paired(self._pair.prefill.name, decode.name if decode else "")
        if decode is None:
            self._admitted()
            await self._prefill(self._pair.prefill, None)
            return
        granted: asyncio.Future[common_pb2.Grant] = asyncio.get_running_loop().create_future()
        legs = [asyncio.create_task(self._decode_leg(decode, granted))]
        # Not a TaskGroup: when one of its tasks fails as it is cancelled, it forgets that it was (Python before 3.13).
        try:
            first: set[asyncio.Future[Any]] = {legs[0], granted}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if granted.done():
                self._admitted()
                legs.append(asyncio.create_task(self._prefill_leg(granted.result())))
            await asyncio.wait(legs, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for leg in legs:
                leg.cancel()
            ended = await asyncio.gather(*legs, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, Exception)]
        if errors:
            # A defect before a typed error.
            raise next((error for error in errors if not isinstance(error, HeadwaterError)), errors[0])

    async def _prefill_leg(self, grant: common_pb2.Grant) -> None:
        """Prefill, by one group after the other if need be."""
        while True:
            group = self._prefill_group
            try:
                return await self._prefill(group, grant)
            except (PeerError, CapacityError) as error:
                self._note_lost(group, error)
                if isinstance(error, CapacityError):
                    # It has not begun, so there is nothing to go on from.
                    raise
                async with self._changing:
                    other = self._replacement()
                    if other is None:
                        raise
                    with _or_raise(error):
                        grant = await self._regrant()
                    self._prefill_group = other.prefill
                    self._timeline.on_resumed()
                    metrics.RESUMES.labels("prefill").inc()
                    self._log.event(
                        Event.RESUMED,
                        attempt=self._attempt,
                        prefill=other.prefill.name,
                        verified_tokens=grant.verified_tokens,
                        instead_of=group.name,
                    )

    async def _decode_leg(self, node: DecodeGroup, granted: asyncio.Future[common_pb2.Grant]) -> None:
        """Decode, by one node after the other if need be.

        Args:
            granted: takes the first grant.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                events, grant = await self._open_decode(stack, node, self._attempt)
            except (PeerError, CapacityError) as error:
                self._note_lost(node, error)
                raise
            granted.set_result(grant)
            while True:
                try:
                    return await self._decode(node, events)
                except PeerError as error:
                    self._note_lost(node, error)
                    if self._answer.finished or not self._prefilling:
                        # Nothing is left to do, or the KV exists no more.
                        raise
                    async with self._changing:
                        other = self._replacement()
                        if other is None or other.decode is None:
                            raise
                        lost, node = node, other.decode
                        with _or_raise(error):
                            await stack.aclose()
                            events, grant = await self._open_decode(stack, node, self._attempt + 1)
                            await self._redirect(grant)
                        self._decode_group = node
                        self._answer.record.redirected(node.name)
                        metrics.RESUMES.labels("decode").inc()
                        self._log.event(Event.RESUMED, attempt=self._attempt, decode=node.name, instead_of=lost.name)

    async def _open_decode(
        self, stack: contextlib.AsyncExitStack, node: DecodeGroup, attempt: int
    ) -> tuple[AsyncIterator[decode_pb2.DecodeResponse], common_pb2.Grant]:
        description = self._prefill_group.description
        request = decode_pb2.DecodeRequest(
            request_id=self._request_id,
            transfer_id=self._transfer_id,
            attempt=attempt,
            num_prompt_tokens=self._job.num_tokens,
            sampling=self._job.sampling,
            stop=self._job.stop,
            source=description.geometry if description else None,
        )
        stack.enter_context(self._groups.dispatched(node.name, self._size.num_tokens))
        events = await stack.enter_async_context(self._peers.decode(node.name, request))
        return events, await self._grant(node, events, attempt)

    async def _regrant(self) -> common_pb2.Grant:
        """The next attempt, at the decode node of now."""
        assert self._decode_group is not None
        attempt = self._attempt + 1
        request = decode_pb2.RegrantRequest(transfer_id=self._transfer_id, attempt=attempt)
        grant = await self._peers.regrant(self._decode_group.name, request)
        self._attempt = attempt
        return grant

    async def _redirect(self, grant: common_pb2.Grant) -> None:
        request = prefill_pb2.RedirectRequest(request_id=self._request_id, grant=grant)
        await self._peers.redirect(self._prefill_group.name, request)
        self._attempt = grant.attempt

    async def _delivery_lost(self, lost: prefill_pb2.DeliveryLost) -> None:
        """The prefill group cannot reach the decode node. If it is the network between them, a new attempt goes on
        from what is verified; if the node is gone, the decode leg finds that out and another node.
        """
        async with self._changing:
            if lost.attempt != self._attempt or self._attempt >= _MOST_ATTEMPTS:
                return
            try:
                await self._redirect(await self._regrant())
            except PeerError as error:
                self._log.warning("the KV could not be sent to the same decode node again", error=str(error))

    def _note_lost(self, group: PrefillGroup | DecodeGroup, error: PeerError | CapacityError) -> None:
        self.lost[group.name] = note_lost(self._groups, group, error, self._log)

    def _replacement(self) -> Pair | None:
        """The pair with the lost group replaced; None when nobody can take its place."""
        if self._attempt >= _MOST_ATTEMPTS:
            return None
        snapshot = self._groups.snapshot(self._job.blocks)

        def remaining(group: PrefillGroup | DecodeGroup | None, now: PrefillGroup | DecodeGroup | None) -> bool:
            """Whether a group may be in the pair: the one that is still there, or any but the lost ones."""
            assert group is not None
            assert now is not None
            return group.name not in self.lost if now.name in self.lost else group.name == now.name

        rest = dataclasses.replace(
            snapshot,
            prefill=tuple(group for group in snapshot.prefill if remaining(group, self._prefill_group)),
            decode=tuple(group for group in snapshot.decode if remaining(group, self._decode_group)),
        )
        try:
            return self._choose(rest, self._size)
        except HeadwaterError as error:
            self._log.warning("no other group can take over", error=str(error))
            return None

    async def _grant(
        self, decode: DecodeGroup, events: AsyncIterator[decode_pb2.DecodeResponse], attempt: int
    ) -> common_pb2.Grant:
        first = await first_response(events, decode, self._deadlines.reply)
        if not first.HasField("grant"):
            raise PeerUnavailable(f"decode {decode} neither granted nor refused the request; see its log.")
        if (first.grant.transfer_id, first.grant.attempt) != (self._transfer_id, attempt):
            raise StalePeer(f"decode {decode} granted transfer {first.grant.transfer_id!r}, not {self._transfer_id!r}.")
        return first.grant

    def _admitted(self) -> None:
        self._timeline.on_admitted()
        self._on_admitted()
        if self._pair.decode is not None:
            self._log.event(Event.ADMITTED)

    async def _prefill(self, group: PrefillGroup, grant: common_pb2.Grant | None) -> None:
        """One group's prefill. Without a grant it gives the whole answer, one token."""
        request = prefill_pb2.PrefillRequest(
            request_id=self._request_id,
            tokens=self._job.tokens,
            sampling=self._job.sampling,
            grant=grant,
            priority=self._job.priority,
        )
        metrics.PROMPT_TOKENS.inc(self._job.num_tokens)
        completed = False
        self._answer.record.prefilling(group.name, self._request_id)
        with self._groups.dispatched(group.name, self._job.num_tokens, self._job.blocks) as computed:
            async with self._peers.prefill(group.name, request) as events:
                if not self._prefilling:
                    self._prefilling = True
                    await self._answer.accept(self._accepted())
                async for event in events:
                    match event.WhichOneof("event"):
                        case "chunk_done":
                            await self._answer.progress(event.chunk_done.token_end)
                        case "first_token":
                            computed()
                            if self._answer.has_first_token:
                                # Another attempt samples the same token again.
                                continue
                            await self._answer.first_token(event.first_token)
                            if grant is None:
                                await self._finish(self._answer.reason_after_one_token(event.first_token.token_id))
                        case "delivery_lost":
                            await self._delivery_lost(event.delivery_lost)
                        case "completed":
                            completed = True
                            self._prefilling = False
                            self._groups.succeeded(group.name)
        if not (completed and self._answer.has_first_token):
            raise PeerUnavailable(f"prefill {group} ended its stream before it was done; see its log.")

    async def _decode(self, group: DecodeGroup, events: AsyncIterator[decode_pb2.DecodeResponse]) -> None:
        """The decode leg, from its grant on."""
        async for event in events:
            match event.WhichOneof("event"):
                case "committed":
                    self._answer.committed()
                    self._groups.succeeded(group.name)
                case "token":
                    await self._answer.token(event.token.token_id, event.token.index)
                case "finished":
                    await self._finish(event.finished.reason)
        if not self._answer.finished:
            raise PeerUnavailable(f"decode {group} ended its stream before it was done; see its log.")

    async def _finish(self, reason: common_pb2.FinishReason.ValueType) -> None:
        await self._answer.finish(reason)
        self._ending.reschedule(asyncio.get_running_loop().time() + self._deadlines.stop)

    def _accepted(self) -> router_pb2.Accepted:
        num_tokens = self._job.num_tokens
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


@contextlib.contextmanager
def _or_raise(error: PeerError | CapacityError) -> Iterator[None]:
    """When the attempt to go on fails as well, what is said is why it was needed."""
    try:
        yield
    except (PeerError, CapacityError) as second:
        raise error from second
