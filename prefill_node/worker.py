"""One rank of a prefill group: applies the leader's log.

The compute thread (this module) takes entries in order: receive, compute, send on, hand the KV over, report.
It never waits for a transfer and never talks to the leader itself; `control` does, on its own thread.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from headwater import tracing
from headwater.errors import HeadwaterError
from headwater.exits import Exit, exit_of
from headwater.lifecycle import configure_logging, get_logger
from headwater.v1 import worker_pb2
from kv_transfer.geometry import Span, head_share
from kv_transfer.metrics_server import MetricsServer
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.sender import SEGMENT_BYTES, Sender, WriterRank
from kv_transfer.slots import SlotArena
from kv_transfer.writer import Writer
from prefill_node.commands import add_worker_arguments
from prefill_node.control import Control
from prefill_node.costs import StageCost
from prefill_node.deliveries import Deliveries
from prefill_node.emulated import EmulatedStage
from prefill_node.kv_pool import DTYPES, FetchedKv, KvPool, PlacedChunk, pin
from prefill_node.pipeline import Pipeline, Place, join, listen_for_store
from prefill_node.steps import Afterwards, Launched, StepRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefill_node.stage import Stage

log = get_logger(__name__)


class Worker:
    """A rank from hello to shutdown."""

    def __init__(self, leader: str, rank: int, host: str, epoch: str) -> None:
        self._host = host
        self._rank = rank
        self._control = Control(leader, worker_pb2.JoinRequest(rank=rank, host=host, pid=os.getpid(), epoch=epoch))

    def run(self) -> None:
        """Returns after an orderly shutdown."""
        try:
            config = self._control.next().config
            with tracing.exporting("worker", config.group, self._rank):
                self._serve(config)
        except HeadwaterError as error:
            log.warning("the worker failed", error=str(error))
            self._fail(str(error))
            raise
        except Exception as error:
            log.exception("the worker failed")
            self._fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._control.close()

    def _fail(self, error: str) -> None:
        self._control.report(worker_pb2.Report(failed=worker_pb2.WorkerFailed(error=error)))

    def _serve(self, config: worker_pb2.WorkerConfig) -> None:
        configure_logging(config.group, config.log_level, self._rank, config.log_format)
        place = Place(self._rank, config.pp, config.tp)
        torch.set_num_threads(config.num_threads)
        device = torch.device("cuda" if config.device == "cuda" else "cpu")
        # Engine, store and process group start threads, which inherit this thread's cores: pin after them.
        engine = MooncakeEngine(self._host, config.transport, config.write_seconds)
        mesh = self._join(place, config)
        exporter = MetricsServer(self._host, 0, role="worker", node=config.group, config={"rank": self._rank})
        layers = Span(config.layer_boundaries[place.stage], config.layer_boundaries[place.stage + 1])
        stage = _make_stage(config, layers, device, mesh)
        share = head_share(config.geometry.num_kv_heads, config.tp, place.tensor_rank)
        heads = share.heads
        pool = KvPool(config.geometry, layers, heads, config.num_pages, device)
        if pool.address is not None:
            # For deliveries that are written page to page.
            engine.register(pool.address, pool.num_bytes)
        arena = SlotArena(engine, max(1, config.send_buffer_bytes // SEGMENT_BYTES), SEGMENT_BYTES)
        if device.type == "cuda":
            for slot in range(arena.num_slots):
                pin(arena.address(slot), arena.slot_bytes)
        writer = Writer(
            engine, write_seconds=config.write_seconds, max_bytes_in_flight=arena.num_slots * arena.slot_bytes
        )
        sender = Sender(
            writer,
            arena,
            pool,
            config.geometry,
            WriterRank(self._rank, config.epoch, share.replica, share.num_replicas, samples=place.samples),
            chunk_tokens=config.chunk_tokens,
            reply_seconds=config.reply_seconds,
            acknowledge_seconds=config.acknowledge_seconds,
        )
        deliveries: Deliveries = self._control.call_and_wait(
            lambda: Deliveries(sender, lambda pages: FetchedKv(pool, pages), self._control.report)
        )
        pipeline = Pipeline(place, stage.hidden_size, stage.dtype, device, depth=config.pp + 1)
        runner = StepRunner(
            place,
            stage,
            pool,
            pipeline,
            lambda request, tokens: self._control.call(deliveries.computed, request, tokens),
        )
        afterwards = Afterwards(threaded=device.type == "cuda")
        if config.HasField("core"):
            os.sched_setaffinity(0, {config.core})
        layer_seconds: list[float] = []
        beside_seconds = 0.0
        if not isinstance(stage, EmulatedStage):
            _warm_up(place, stage, pool)
            if config.measure_layers:
                layer_seconds, beside_seconds = _measure_layers(place, stage, pool, config.chunk_tokens)
        ready = worker_pb2.Ready(
            parameter_bytes=stage.parameter_bytes,
            num_parameters=stage.num_parameters,
            pool_bytes=pool.num_bytes,
            transport=engine.transport,
            metrics_address=exporter.address,
            layer_seconds=layer_seconds,
            beside_seconds=beside_seconds,
        )
        self._control.report(worker_pb2.Report(ready=ready))
        log.info(
            "ready", layers=[layers.start, layers.end], heads=[heads.start, heads.end], parameters=ready.num_parameters
        )
        try:
            self._follow(runner, afterwards, deliveries, place)
            pipeline.drain()
        finally:
            writer.close()
            sender.close()
            exporter.stop()
            arena.close()
            engine.close()
        dist.destroy_process_group()

    def _join(self, place: Place, config: worker_pb2.WorkerConfig) -> DeviceMesh | None:
        listener = listen_for_store(self._host) if place.rank == 0 else None
        port = listener.getsockname()[1] if listener is not None else 0
        self._control.report(worker_pb2.Report(joined=worker_pb2.Joined(store_port=port)))
        rendezvous = self._control.next().rendezvous
        return join(
            place,
            host=self._host,
            store_host=rendezvous.store_host,
            store_port=rendezvous.store_port,
            listener=listener,
            backend="nccl" if config.device == "cuda" else "gloo",
            seconds=config.step_seconds,
        )

    def _follow(self, runner: StepRunner, afterwards: Afterwards, deliveries: Deliveries, place: Place) -> None:
        """Applies the log until it says to shut down."""
        # Entries already taken from the log while looking ahead for the next step.
        ahead: collections.deque[worker_pb2.LogRecord] = collections.deque()
        expected = -1

        def finish(launched: Launched) -> None:
            done = runner.finish(launched)
            if place.tensor_rank == 0:
                self._control.report(worker_pb2.Report(step_done=done))
            self._end_requests(launched.step, done, runner, deliveries)

        while True:
            entry = ahead.popleft() if ahead else self._control.next()
            if entry.HasField("step"):
                while (further := self._control.next_if_any()) is not None:
                    ahead.append(further)
                # This step's receive, and the next one's if it is known, are posted before computing.
                for step in [entry.step, *(later.step for later in ahead if later.HasField("step"))][:2]:
                    if step.sequence > expected:
                        runner.expect(step)
                        expected = step.sequence
                afterwards.run(functools.partial(finish, runner.launch(entry.step)))
            elif entry.HasField("shutdown"):
                afterwards.close()
                return
            else:
                self._apply(entry, runner, afterwards, deliveries)

    def _end_requests(
        self, step: worker_pb2.Step, done: worker_pb2.StepDone, runner: StepRunner, deliveries: Deliveries
    ) -> None:
        """What had its last chunk in this step is delivered to its end."""
        tokens = {sampled.request_id: sampled.token_id for sampled in done.sampled}
        for chunk in step.chunks:
            if chunk.last and not chunk.void:
                runner.close(chunk.request_id)
                close = functools.partial(deliveries.close, chunk.request_id, tokens.get(chunk.request_id), abort=False)
                self._control.call(close)

    def _apply(
        self, entry: worker_pb2.LogRecord, runner: StepRunner, afterwards: Afterwards, deliveries: Deliveries
    ) -> None:
        """An entry about a request that computes nothing."""
        change: Callable[[], None]
        if entry.HasField("open"):
            runner.open(entry.open)
            change = functools.partial(deliveries.open, entry.open)
        elif entry.HasField("abort"):
            runner.close(entry.abort.request_id)
            change = functools.partial(deliveries.close, entry.abort.request_id, None, abort=True)
        elif entry.HasField("redirect"):
            change = functools.partial(deliveries.redirect, entry.redirect)
        elif entry.HasField("forget"):
            change = functools.partial(deliveries.forget, entry.forget.request_id)
        else:
            return
        # Pages are given back only when the steps before this entry are done with them.
        afterwards.run(functools.partial(self._control.call, change))


def _make_stage(
    config: worker_pb2.WorkerConfig, layers: Span, device: torch.device, mesh: DeviceMesh | None
) -> Stage | EmulatedStage:
    geometry = config.geometry
    if config.device == "emulated":
        cost = config.emulated_cost
        return EmulatedStage(
            layers,
            last=layers.end == geometry.num_layers,
            vocab_size=geometry.vocab_size,
            dtype=DTYPES[geometry.dtype],
            cost=StageCost(cost.base, cost.per_prefix_token, cost.per_token, cost.per_pair),
        )
    # Takes seconds to import, which emulated groups of many ranks can do without.
    from prefill_node.stage import Stage  # noqa: PLC0415

    return Stage(
        Path(config.model),
        layers=layers,
        num_layers=geometry.num_layers,
        dtype=DTYPES[geometry.dtype],
        device=device,
        tensor_mesh=mesh,
        max_context_tokens=config.max_context_tokens,
    )


def _warm_up(place: Place, stage: Stage, pool: KvPool) -> None:
    """Two small chunks of a made-up request: finds what the model needs and this service lacks before any
    request does, and lets libraries set themselves up. The pages are free, so what it writes is never read.
    """
    layout = pool.layout
    half = max(1, layout.page_size // 2)
    if layout.num_pages * layout.page_size < 2 * half:
        return
    for start in (0, half):
        prefix = [(0, start)] if start else []
        chunk = PlacedChunk("warm-up", Span(start, start + half), 0, prefix, [(start, half)])
        source, positions = _made_up(place, stage, chunk)
        stage.forward(source, positions, pool, [chunk], [half - 1] if start else [])


def _measure_layers(place: Place, stage: Stage, pool: KvPool, chunk_tokens: int) -> tuple[list[float], float]:
    """Medians of a few rounds over one chunk without a prefix. All tensor ranks of a stage do this together."""
    layout = pool.layout
    count = min(chunk_tokens, layout.num_pages * layout.page_size)
    chunk = PlacedChunk("layers", Span(0, count), 0, [], [(0, count)])
    source, positions = _made_up(place, stage, chunk)
    rounds = [stage.layer_seconds(source, positions, pool, [chunk]) for _ in range(3)]
    layers = [statistics.median(times) for times in zip(*(taken for taken, _ in rounds), strict=True)]
    return layers, statistics.median(beside for _, beside in rounds)


def _made_up(place: Place, stage: Stage, chunk: PlacedChunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and positions of a step that holds nothing but `chunk`."""
    if place.previous is None:
        source = torch.zeros(len(chunk.tokens), dtype=torch.long, device=stage.device)
    else:
        source = stage.empty(len(chunk.tokens))
    return source, torch.arange(chunk.tokens.start, chunk.tokens.end, device=stage.device)


def run(arguments: argparse.Namespace) -> int:
    """Runs one rank until the leader shuts it down. Returns the exit code."""
    host = arguments.host or arguments.leader.rpartition(":")[0]
    configure_logging("prefill", "info", arguments.rank)
    try:
        Worker(arguments.leader, arguments.rank, host, arguments.epoch).run()
    except HeadwaterError as error:
        print(f"headwater: error: {error}", file=sys.stderr)  # noqa: T201
        return exit_of(error)
    return Exit.DONE


def main() -> int:
    parser = argparse.ArgumentParser(prog="headwater prefill worker", description=__doc__)
    add_worker_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
