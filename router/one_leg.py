"""The only leg of a request with a short prompt: a decode group computes the prompt and the answer, and no KV moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from headwater.cluster import Deadlines
from headwater.errors import CapacityError, PeerError, PeerUnavailable
from headwater.lifecycle import Event, Logger
from headwater.v1 import decode_pb2, prefill_pb2, router_pb2
from router.answer import Answer
from router.leg import Groups, Peers, first_response, note_lost
from router.request import Job
from router.snapshot import DecodeGroup, Loss
from router.ttft import Timeline


class OneLeg:
    """Runs one request on one decode group; as `router.legs.Legs`."""

    def __init__(
        self,
        peers: Peers,
        groups: Groups,
        deadlines: Deadlines,
        on_admitted: Callable[[], None],
        group: DecodeGroup,
        job: Job,
        request_id: str,
        answer: Answer,
        timeline: Timeline,
        log: Logger,
    ) -> None:
        self._peers = peers
        self._groups = groups
        self._deadlines = deadlines
        self._on_admitted = on_admitted
        self._group = group
        self._job = job
        self._request_id = request_id
        self._answer = answer
        self._timeline = timeline
        self._log = log
        self._ending = asyncio.timeout(None)
        self.lost: dict[str, Loss] = {}

    async def run(self) -> None:
        """Returns when the client has its answer and the group has let go of the request.

        Raises:
            HeadwaterError: the group refused the request, or failed before the answer was complete.
        """
        group = self._group
        self._log.event(Event.PAIRED, prefill=group.name, decode=group.name)
        request = decode_pb2.DecodeRequest(
            request_id=self._request_id,
            num_prompt_tokens=self._job.num_tokens,
            sampling=self._job.sampling,
            stop=self._job.stop,
            tokens=self._job.tokens,
        )
        try:
            with self._groups.dispatched(group.name, self._job.num_tokens + self._job.stop.max_tokens):
                async with self._ending, self._peers.decode(group.name, request) as events:
                    await self._admitted(events)
                    await self._follow(events)
        except TimeoutError:
            seconds = self._deadlines.stop
            self._log.warning("the leg did not end after the answer", deadline="deadlines.stop", seconds=seconds)
        except (PeerError, CapacityError) as error:
            if self._answer.finished:
                self._log.warning("the leg failed after the answer was complete", error=str(error))
                return
            self.lost[group.name] = note_lost(self._groups, group, error, self._log)
            raise

    async def _admitted(self, events: AsyncIterator[decode_pb2.DecodeResponse]) -> None:
        first = await first_response(events, self._group, self._deadlines.reply)
        if not first.HasField("admitted"):
            raise PeerUnavailable(f"decode {self._group} neither admitted nor refused the request; see its log.")
        self._timeline.on_admitted()
        self._on_admitted()
        self._log.event(Event.ADMITTED)
        name = self._group.name
        await self._answer.accept(
            router_pb2.Accepted(
                request_id=self._job.request_id,
                prefill_group=name,
                decode_group=name,
                num_prompt_tokens=self._job.num_tokens,
                num_chunks=1,
                seed=self._job.sampling.seed,
            )
        )

    async def _follow(self, events: AsyncIterator[decode_pb2.DecodeResponse]) -> None:
        async for event in events:
            match event.WhichOneof("event"):
                case "prompt_computed":
                    computed = event.prompt_computed
                    await self._answer.first_token(
                        prefill_pb2.FirstToken(
                            token_id=computed.token_id,
                            queue_seconds=computed.queue_seconds,
                            compute_seconds=computed.compute_seconds,
                        )
                    )
                case "token":
                    await self._answer.token(event.token.token_id, event.token.index)
                case "finished":
                    await self._answer.finish(event.finished.reason)
                    self._groups.succeeded(self._group.name)
                    self._ending.reschedule(asyncio.get_running_loop().time() + self._deadlines.stop)
        if not self._answer.finished:
            raise PeerUnavailable(f"decode {self._group} ended its stream before it was done; see its log.")
