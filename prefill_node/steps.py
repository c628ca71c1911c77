"""Computes steps: everything between a plan and its results, with no leader and no transfers.

A step is launched and then finished. On the CPU launching is computing, and finishing follows at once. On CUDA
launching queues kernels on a stream of its own; finishing waits on an event, on another thread, so that the next step
is launched while the device computes this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from headwater.lifecycle import Event, get_logger
from headwater.v1 import common_pb2, worker_pb2
from kv_transfer.geometry import Span
from prefill_node import worker_metrics as metrics
from prefill_node.emulated import EmulatedStage
from prefill_node.kv_pool import KvPool, PlacedChunk
from prefill_node.pipeline import Pipeline, Place
from prefill_node.sampling import sample

if TYPE_CHECKING:
    from prefill_node.stage import Stage

log = get_logger(__name__)


class _Mark:
    """A moment in a device's work."""

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device has come so far. The CPU always has."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: _Mark) -> float:
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1e3
        return self._at - earlier._at


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step that the device has, or has done."""

    step: worker_pb2.Step
    chunks: list[PlacedChunk]
    # Of `chunks`, those whose requests end with them, and how their first answer token is drawn.
    ending: list[tuple[PlacedChunk, common_pb2.SamplingParams]]
    # Logits of `ending` on the last stage, else hidden states.
    result: torch.Tensor
    asked: _Mark
    started: _Mark
    ended: _Mark


@dataclasses.dataclass(frozen=True)
class _Running:
    """A request that this rank has pages for."""

    pages: list[int]
    sampling: common_pb2.SamplingParams


class StepRunner:
    """One rank's computing.

    Args:
        computed: called for each chunk whose KV is complete in the pool.
    """

    def __init__(
        self,
        place: Place,
        stage: Stage | EmulatedStage,
        pool: KvPool,
        pipeline: Pipeline,
        computed: Callable[[str, Span], None],
    ) -> None:
        self._place = place
        self._stage = stage
        self._pool = pool
        self._pipeline = pipeline
        self._computed = computed
        self._requests: dict[str, _Running] = {}
        cuda = stage.device.type == "cuda"
        self._stream = torch.cuda.Stream(stage.device) if cuda else None

    def open(self, request: worker_pb2.OpenRequest) -> None:
        self._requests[request.request_id] = _Running(list(request.pages), request.sampling)

    def close(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def expect(self, step: worker_pb2.Step) -> None:
        """Posts the receive of a step that will be launched next."""
        with self._on_stream():
            self._pipeline.post(sum(chunk.end - chunk.start for chunk in step.chunks))

    def launch(self, step: worker_pb2.Step) -> Launched:
        """Runs a step that was expected. Chunks that are void keep their place and are not computed."""
        with self._on_stream():
            asked = _Mark(self._stage.device)
            hidden = self._pipeline.take() if self._place.previous is not None else None
            started = _Mark(self._stage.device)
            planned = [chunk for chunk in step.chunks if not chunk.void]
            chunks = self._place_chunks(planned)
            ending = [
                (placed, self._requests[chunk.request_id].sampling)
                for placed, chunk in zip(chunks, planned, strict=True)
                if chunk.last
            ]
            result = self._forward(step, chunks, [placed for placed, _ in ending], hidden)
            if self._place.following is not None:
                self._pipeline.send(result)
            return Launched(step, chunks, ending, result, asked, started, _Mark(self._stage.device))

    def finish(self, launched: Launched) -> worker_pb2.StepDone:
        """Waits for the step; its KV may leave now."""
        launched.ended.wait()
        done = worker_pb2.StepDone(
            sequence=launched.step.sequence,
            wait_seconds=launched.started.seconds_since(launched.asked),
            compute_seconds=launched.ended.seconds_since(launched.started),
        )
        metrics.STEP_SECONDS.observe(done.compute_seconds)
        for chunk in launched.chunks:
            log.event(Event.CHUNK_FINISHED, request=chunk.request_id, tokens=[chunk.tokens.start, chunk.tokens.end])
            self._computed(chunk.request_id, chunk.tokens)
        if self._place.samples:
            for (chunk, sampling), logits in zip(
                launched.ending, launched.result if launched.ending else [], strict=True
            ):
                done.sampled.add(request_id=chunk.request_id, token_id=sample(logits, sampling, chunk.tokens.end))
        return done

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def _forward(
        self, step: worker_pb2.Step, chunks: list[PlacedChunk], ending: list[PlacedChunk], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of all tokens of the step (void ones have any); on the last stage, logits of `ending`."""
        num_tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
        device = self._stage.device
        if not chunks:
            return self._stage.empty(num_tokens)
        # Where in the step the tokens are that are computed; None: everywhere.
        rows = self._rows(step) if any(chunk.void for chunk in step.chunks) else None
        for chunk in chunks:
            log.event(Event.CHUNK_STARTED, request=chunk.request_id, tokens=[chunk.tokens.start, chunk.tokens.end])
        positions = torch.cat([torch.arange(chunk.tokens.start, chunk.tokens.end, device=device) for chunk in chunks])
        source = self._tokens(step) if hidden is None else hidden
        if hidden is not None and rows is not None:
            source = hidden[rows]
        logits_of = [chunk.offset + len(chunk.tokens) - 1 for chunk in ending]
        result = self._stage.forward(source, positions, self._pool, chunks, logits_of)
        if rows is None or self._place.following is None:
            return result
        whole = self._stage.empty(num_tokens)
        whole[rows] = result
        return whole

    def _tokens(self, step: worker_pb2.Step) -> torch.Tensor:
        packed = np.frombuffer(b"".join(chunk.tokens for chunk in step.chunks if not chunk.void), "<u4")
        tokens = torch.from_numpy(packed.astype(np.int64))
        return tokens if self._stream is None else tokens.pin_memory().to(self._stage.device, non_blocking=True)

    def _rows(self, step: worker_pb2.Step) -> torch.Tensor:
        kept = [
            torch.full((chunk.end - chunk.start,), not chunk.void, device=self._stage.device) for chunk in step.chunks
        ]
        return torch.cat(kept).nonzero().squeeze(1)

    def _place_chunks(self, chunks: list[worker_pb2.Chunk]) -> list[PlacedChunk]:
        placed: list[PlacedChunk] = []
        offset = 0
        for chunk in chunks:
            pages, tokens = self._requests[chunk.request_id].pages, Span(chunk.start, chunk.end)
            layout = self._pool.layout
            prefix_runs = layout.runs(pages, Span(0, chunk.start)) if chunk.start else []
            placed.append(PlacedChunk(chunk.request_id, tokens, offset, prefix_runs, layout.runs(pages, tokens)))
            offset += len(tokens)
        return placed


class Afterwards:
    """What follows launched steps, in the order of the log: their ends, and what the log says about requests.

    Args:
        threaded: on a thread of its own, for devices that work by themselves; else at once.
    """

    def __init__(self, *, threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="finish") if threaded else None
        self._newest: Future[None] | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Raises what earlier work has raised; after that nothing is run any more."""
        if self._pool is None:
            work()
            return
        before = self._newest
        if before is not None and before.done():
            before.result()

        def follow() -> None:
            if before is not None:
                before.result()
            work()

        self._newest = self._pool.submit(follow)

    def close(self) -> None:
        """Waits for all work. Raises what it has raised."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if self._newest is not None:
            self._newest.result()
