"""A decoder on stock `transformers`: continues several requests at once from KV that others computed.

One thread runs the model; requests join and leave between steps. A request may also bring its prompt, which is then
computed in one piece, before the step of the others. This module shares no model code with
`prefill_node`, so that each can be checked against the other.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
import torch
from transformers import AutoModelForCausalLM

from headwater.draws import uniform
from headwater.lifecycle import get_logger
from headwater.v1 import common_pb2
from kv_transfer.connectors import ragged
from kv_transfer.connectors.ragged import DTYPES, RaggedCache, RequestKv, Row

log = get_logger(__name__)


@dataclasses.dataclass
class Continuation:
    """One request being decoded. The callbacks come from the decoder's thread.

    Args:
        tokens: generated so far. The first one came from prefill; none: the prompt is to be computed here.
        prompt: token ids, if it is.
        on_token: a new token, and why it is the last one, if it is.
        on_error: the model failed; no further call but `on_left`.
        on_left: the decoder does not touch this request, or its KV, any more.
    """

    kv: RequestKv
    num_prompt_tokens: int
    tokens: list[int]
    sampling: common_pb2.SamplingParams
    stop: common_pb2.StopConditions
    on_token: Callable[[int, common_pb2.FinishReason.ValueType | None], None]
    on_error: Callable[[Exception], None]
    on_left: Callable[[], None]
    prompt: Sequence[int] = ()
    # When the prompt's computing began, in seconds of the monotonic clock.
    begun_at: float = 0.0


class Decoder:
    """Runs the model on a thread of its own.

    Args:
        folder: Hugging Face folder.
        num_threads: of torch.
        core: pins the thread; None does not.
    """

    def __init__(
        self, folder: Path, *, dtype: str, max_context_tokens: int | None, num_threads: int, core: int | None
    ) -> None:
        ragged.register()
        overrides = {"max_position_embeddings": max_context_tokens} if max_context_tokens else {}
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation=ragged.NAME, **overrides
        ).eval()
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._num_threads = num_threads
        self._core = core
        self._changed = threading.Condition()
        self._active: list[Continuation] = []
        self._leaving: list[Continuation] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self._thread.start()

    def add(self, continuation: Continuation) -> None:
        """Joins at the next step."""
        with self._changed:
            self._active.append(continuation)
            self._changed.notify_all()

    def remove(self, continuation: Continuation) -> None:
        """Leaves at the end of the running step; `on_left` says when. Fine for one that has left already."""
        with self._changed:
            if continuation in self._active:
                self._leaving.append(continuation)
                self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread after the running step."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def finish_reason(
        self, tokens: list[int], stop: common_pb2.StopConditions
    ) -> common_pb2.FinishReason.ValueType | None:
        """Why an answer that consists of `tokens` is complete, or None."""
        if tokens[-1] in stop.eos_token_ids:
            return common_pb2.FINISH_REASON_EOS
        if stop.stop and self._ends_with_stop(tokens, list(stop.stop)):
            return common_pb2.FINISH_REASON_STOP
        if len(tokens) >= stop.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return None

    def _ends_with_stop(self, tokens: list[int], stop: list[str]) -> bool:
        # A stop string that the last token completed lies within its own length in characters, and a character
        # takes at most four byte-level tokens.
        window = tokens[-(4 * max(map(len, stop)) + 4) :]
        text = self._tokenizer.decode(window, skip_special_tokens=True)
        return any(string in text for string in stop)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})
        while True:
            with self._changed:
                self._drop(self._leaving)
                self._changed.wait_for(lambda: self._active or self._stopping)
                if self._stopping:
                    self._drop(list(self._active))
                    return
                batch = list(self._active)
            try:
                done = self._step(batch)
            except Exception as error:  # the thread serves other requests, so it outlives a failing batch
                log.exception("decoding failed", requests=len(batch))
                for continuation in batch:
                    continuation.on_error(error)
                done = batch
            with self._changed:
                self._drop(done)

    def _drop(self, continuations: list[Continuation]) -> None:
        for continuation in list(continuations):
            if continuation in self._active:
                self._active.remove(continuation)
                continuation.on_left()
        self._leaving = [left for left in self._leaving if left in self._active]

    @torch.inference_mode()
    def _step(self, batch: list[Continuation]) -> list[Continuation]:
        """One token for each request of `batch`. Returns those that are complete."""
        new = [row for row in batch if not row.tokens]
        running = [row for row in batch if row.tokens]
        done = [row for row in new if self._compute_prompt(row)]
        return done + (self._continue(running) if running else [])

    def _compute_prompt(self, row: Continuation) -> bool:
        """The first token of one request. Returns whether that is all."""
        row.begun_at = time.monotonic()
        cache = RaggedCache([Row(row.kv, 0)])
        logits = self._model(
            input_ids=torch.tensor([list(row.prompt)]),
            position_ids=torch.arange(row.num_prompt_tokens).unsqueeze(0),
            cache=cache,
            use_cache=True,
            ragged=cache,
            logits_to_keep=1,
        ).logits[0, -1]
        return self._take(row, logits, row.num_prompt_tokens)

    def _continue(self, batch: list[Continuation]) -> list[Continuation]:
        lengths = [row.num_prompt_tokens + len(row.tokens) - 1 for row in batch]
        cache = RaggedCache([Row(row.kv, length) for row, length in zip(batch, lengths, strict=True)])
        logits = self._model(
            input_ids=torch.tensor([[row.tokens[-1]] for row in batch]),
            position_ids=torch.tensor([[length] for length in lengths]),
            cache=cache,
            use_cache=True,
            ragged=cache,
        ).logits[:, -1]
        taken = zip(batch, lengths, logits, strict=True)
        return [row for row, length, row_logits in taken if self._take(row, row_logits, length + 1)]

    def _take(self, row: Continuation, logits: torch.Tensor, position: int) -> bool:
        """The next token of a request. Returns whether it is the last."""
        token = choose(logits, row.sampling, position)
        row.tokens.append(token)
        reason = self.finish_reason(row.tokens, row.stop)
        row.on_token(token, reason)
        return reason is not None


def choose(logits: torch.Tensor, sampling: common_pb2.SamplingParams, position: int) -> int:
    """The next token: greedy for temperature 0, else nucleus sampling with the request's own draw.

    Args:
        logits: [vocab].
        position: of the chosen token in the sequence (prompt and answer).
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = (logits.double() / sampling.temperature).softmax(dim=-1)
    order = probabilities.argsort(descending=True)
    target = uniform(sampling.seed, position)
    top_p = sampling.top_p or 1.0
    # Tokens of the nucleus: those before which less than top_p has been collected.
    total = 0.0
    nucleus: list[tuple[int, float]] = []
    for token in order.tolist():
        probability = float(probabilities[token])
        nucleus.append((token, probability))
        total += probability
        if total >= top_p:
            break
    collected = 0.0
    for token, probability in nucleus:
        collected += probability
        if target * total < collected:
            return token
    return nucleus[-1][0]
