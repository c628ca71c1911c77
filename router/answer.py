"""The answer to one request as its client sees it: the order of events, the text, and the TTFT.

Prefill and decode report on two paths, and a decode group may be heard before the first token is. The
answer puts that right: nothing of decode is sent before the first token.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from headwater.errors import TransferFailed
from headwater.lifecycle import Event, Logger
from headwater.v1 import common_pb2, prefill_pb2, router_pb2
from router import metrics, spans
from router.history import Record
from router.request import Job
from router.text_stream import TextStream
from router.ttft import Timeline


class ClientStream(Protocol):
    """Where responses go."""

    async def send(self, response: router_pb2.GenerateResponse) -> None:
        """Returns when the transport has taken the response."""


class Answer:
    """Sends one answer. The flow calls each method from the leg that learned of it."""

    def __init__(
        self, client: ClientStream, job: Job, text: TextStream, timeline: Timeline, log: Logger, record: Record
    ) -> None:
        self._client = client
        self._job = job
        self._text = text
        self._timeline = timeline
        self._log = log
        self.record = record
        self._token_ids: list[int] = []
        self._ttft = router_pb2.TtftParts()
        self._last_token_at = 0.0
        self._first_token_sent = asyncio.Event()
        self.finished = False
        self.is_committed = False

    @property
    def has_first_token(self) -> bool:
        """Whether the client was sent a token."""
        return self._first_token_sent.is_set()

    async def accept(self, accepted: router_pb2.Accepted) -> None:
        """The request is paired."""
        await self._client.send(router_pb2.GenerateResponse(accepted=accepted))

    async def progress(self, tokens_done: int) -> None:
        """So much of the prompt has left the last stage."""
        self.record.progress(tokens_done)
        progress = router_pb2.Progress(tokens_done=tokens_done, tokens_total=self._job.num_tokens)
        await self._client.send(router_pb2.GenerateResponse(progress=progress))

    async def first_token(self, sampled: prefill_pb2.FirstToken) -> None:
        """Prefill has sampled the first token: it goes out at once."""
        self._timeline.first_token = time.monotonic()
        self.record.progress(self._job.num_tokens)
        await self._send_token(sampled.token_id)
        self._ttft = self._timeline.parts(sampled, sent=self._last_token_at)
        self.record.first_token(self._ttft)
        self._first_token_sent.set()
        self._log.event(Event.FIRST_TOKEN_SENT, token=sampled.token_id)
        metrics.observe_ttft(self._ttft)
        spans.first_token_sent(self._ttft)

    def committed(self) -> None:
        """The decode group has all KV."""
        self._timeline.committed = time.monotonic()
        self.is_committed = True
        self.record.committed()
        self._log.event(Event.COMMITTED)

    async def token(self, token_id: int, index: int) -> None:
        """Decode has produced a token. One after the stop string is not part of the answer, and one that the client has
        is not sent again: a decode group that takes over begins at index 1.

        Raises:
            TransferFailed: another token than this one was sent at that place.
        """
        await self._first_token_sent.wait()
        if index < len(self._token_ids):
            if token_id != self._token_ids[index]:
                raise TransferFailed(
                    f"the answer cannot go on elsewhere: its token {index} is {token_id} there, and "
                    f"{self._token_ids[index]} was sent. Ask again; groups of one kind of machine answer alike."
                )
        elif not self._text.stopped:
            await self._send_token(token_id)

    async def finish(self, reason: common_pb2.FinishReason.ValueType) -> None:
        """The answer is complete."""
        await self._first_token_sent.wait()
        text = self._text.finish()
        if self._text.stopped:
            reason = common_pb2.FINISH_REASON_STOP
        finished = router_pb2.Finished(
            reason=reason,
            num_prompt_tokens=self._job.num_tokens,
            num_generated_tokens=len(self._token_ids),
            text=text,
            ttft=self._ttft,
            commit_after_first_token_seconds=self._timeline.commit_after_first_token,
        )
        self.finished = True
        outcome = common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
        self.record.finished(outcome)
        metrics.REQUESTS.labels(outcome).inc()
        num_tokens = len(self._token_ids)
        if num_tokens > 1:
            first_token_at = self._timeline.received + self._ttft.total
            metrics.TIME_PER_OUTPUT_TOKEN_SECONDS.observe((self._last_token_at - first_token_at) / (num_tokens - 1))
        if self.is_committed:
            metrics.KV_EXPOSED_SECONDS.observe(self._timeline.commit_after_first_token)
        spans.finished(outcome, num_tokens)
        self._log.event(Event.FINISHED, reason=outcome, num_generated_tokens=num_tokens)
        await self._client.send(router_pb2.GenerateResponse(finished=finished))

    def reason_after_one_token(self, token_id: int) -> common_pb2.FinishReason.ValueType:
        """Why an answer of one token ends."""
        if token_id in self._job.stop.eos_token_ids:
            return common_pb2.FINISH_REASON_EOS
        return common_pb2.FINISH_REASON_LENGTH

    async def _send_token(self, token_id: int) -> None:
        token = router_pb2.Token(id=token_id, index=len(self._token_ids), text=self._text.push(token_id))
        self._token_ids.append(token_id)
        self.record.num_generated_tokens = len(self._token_ids)
        metrics.GENERATED_TOKENS.inc()
        await self._client.send(router_pb2.GenerateResponse(token=token))
        self._last_token_at = time.monotonic()
