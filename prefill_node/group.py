"""The leader process of one prefill group: what it is made of, how it starts and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from headwater import tracing
from headwater.cluster import Cluster, Prefill
from headwater.errors import HeadwaterError, InvalidRequest, PeerUnavailable, UnsupportedModel
from headwater.lifecycle import get_logger
from headwater.membership import registered
from headwater.rpc import Server
from headwater.stopping import Stopping
from headwater.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc, router_pb2, worker_pb2, worker_pb2_grpc
from kv_transfer.geometry import geometry_of
from kv_transfer.metrics_server import MetricsServer
from kv_transfer.model_folder import ModelFolder, check_parallel, layer_boundaries, read_model_folder
from prefill_node import leader_metrics as metrics
from prefill_node.chunking import ChunkPolicy
from prefill_node.chunking.policies import make_policy
from prefill_node.costs import GroupCost, LearnedCost, relative_error
from prefill_node.leader import Leader
from prefill_node.links import WorkerLinks
from prefill_node.pages import PagePool
from prefill_node.partition import partition
from prefill_node.profiles import profile_named
from prefill_node.profiling import (
    load,
    load_boundaries,
    measure,
    profile_points,
    save,
    save_boundaries,
    saved_at,
)
from prefill_node.scheduler import Limits, Scheduler
from prefill_node.spans import traced_prefill

log = get_logger(__name__)

# How long profiling may take, about.
_PROFILE_SECONDS = 20.0
# Between a lost group and the next try, doubling from the first to the last.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 30.0


def worker_configs(
    cluster: Cluster, group: Prefill, folder: ModelFolder, epoch: str, boundaries: Sequence[int] | None = None
) -> list[worker_pb2.WorkerConfig]:
    """What each rank must know, in rank order; rank = stage · tp + tensor rank.

    Args:
        boundaries: of the stages' layers; None: as the configuration says.
    """
    measured = boundaries is not None
    boundaries = boundaries or layer_boundaries(folder.num_layers, group.pp, group.layer_splits)
    emulated = _emulated_costs(group) if group.device == "emulated" else None
    return [
        worker_pb2.WorkerConfig(
            group=group.name,
            epoch=epoch,
            model=str(folder.path),
            geometry=geometry_of(folder, cluster.model, group.page_size, group.dtype),
            pp=group.pp,
            tp=group.tp,
            layer_boundaries=boundaries,
            num_pages=-(-group.pool_tokens // group.page_size),
            device=group.device,
            num_threads=group.threads_per_rank,
            core=group.cores[rank % len(group.cores)] if group.cores else None,
            chunk_tokens=group.chunk_tokens,
            chunk_policy=group.chunk_policy,
            transport=group.transport,
            send_buffer_bytes=group.send_buffer_mb * 1024 * 1024,
            log_level=cluster.log_level,
            log_format=cluster.log_format,
            max_context_tokens=cluster.model.max_context_tokens or 0,
            write_seconds=cluster.deadlines.write,
            reply_seconds=cluster.deadlines.reply,
            acknowledge_seconds=cluster.deadlines.acknowledge,
            step_seconds=cluster.deadlines.step,
            measure_layers=group.measure_layers and not measured,
            emulated_cost=emulated[rank // group.tp] if emulated is not None else None,
        )
        for rank in range(group.pp * group.tp)
    ]


def limits_of(section: Prefill) -> Limits:
    """Of the group's scheduler."""
    return Limits(
        step_tokens=section.chunk_tokens,
        look_ahead=section.look_ahead,
        max_running=section.max_running_requests,
        max_queued=section.max_queued_requests,
        max_wait_seconds=section.max_wait,
    )


def policy_of(section: Prefill, cost: Callable[[], GroupCost]) -> ChunkPolicy:
    """How the group cuts prompts."""
    return make_policy(
        section.chunk_policy,
        cost,
        chunk_tokens=section.chunk_tokens,
        page_size=section.page_size,
        smoothing=section.chunk_smoothing,
    )


def _emulated_costs(group: Prefill) -> list[common_pb2.StageCost]:
    stages = profile_named(group.emulated_profile).cost(group.pp).stages
    return [common_pb2.StageCost(**dataclasses.asdict(stage.scaled(group.emulated_time_scale))) for stage in stages]


class Group:
    """One prefill group over all its incarnations: when its workers are lost, it starts them again as a new epoch.

    Args:
        folder: of the model, already checked to fit the group's layout.
        address: of the leader, for the workers that it starts.
        metrics: address of the leader's own metrics.
    """

    def __init__(self, cluster: Cluster, section: Prefill, folder: ModelFolder, address: str, metrics: str) -> None:
        self._cluster = cluster
        self._section = section
        self._folder = folder
        self._address = address
        self._metrics = metrics
        # No new requests are taken.
        self.draining = False
        # Of the stages' layers, when they were measured on this machine.
        self._boundaries: list[int] | None = None
        self._renew()
        if section.measure_layers:
            self._boundaries = load_boundaries(self.configs[0])
            self._renew()

    def _renew(self) -> None:
        """A new incarnation: nothing of the last one is used again."""
        section, deadlines = self._section, self._cluster.deadlines
        self.configs = worker_configs(
            self._cluster, section, self._folder, epoch=secrets.token_hex(8), boundaries=self._boundaries
        )
        config = self.configs[0]
        cost = LearnedCost(section.pp)
        self.leader = Leader(
            Scheduler(
                PagePool(config.num_pages, section.page_size, keep_prefixes=section.prefix_cache),
                num_stages=section.pp,
                world_size=len(self.configs),
                limits=limits_of(section),
                cuts=policy_of(section, lambda: cost.group),
                seconds=cost.seconds,
                clock=time.monotonic,
            ),
            config.geometry,
            cost,
            deadlines,
            tp=section.tp,
        )
        self.lost = asyncio.Event()
        host = section.address.rpartition(":")[0]
        hosts = section.hosts or (host,)
        world_size = len(self.configs)
        self.links = WorkerLinks(
            self.configs,
            local_ranks=[rank for rank in range(world_size) if hosts[rank * len(hosts) // world_size] == host],
            start_seconds=deadlines.worker_start,
            silence_seconds=deadlines.silence,
            on_report=self.leader.on_report,
            on_lost=self._on_lost,
        )

    def _on_lost(self, reason: str) -> None:
        self.leader.stop_serving(reason)
        self.lost.set()

    async def start(self) -> None:
        """Brings all ranks up and begins to serve.

        Raises:
            PeerUnavailable, DeadlinePassed: a worker did not come up.
        """
        await self.links.start(self._address)
        if self._section.measure_layers and self._boundaries is None and self._split_layers():
            await self.links.kill()
            self._renew()
            await self.links.start(self._address)
        if self._section.chunk_policy != "fixed":
            await self._learn_costs()
        self.leader.begin(self.links)
        log.info("serving", address=self._address, metrics=self._metrics, pp=self._section.pp, tp=self._section.tp)

    async def restart(self) -> None:
        """Tries until the group serves again."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            reason = self.leader.not_serving
            await self.links.kill()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._renew()
            self.leader.not_serving = f"restarting: {reason}"
            metrics.RESTARTS.inc()
            try:
                await self.start()
            except HeadwaterError as error:
                log.warning("the group did not come up again", error=str(error), next_try_seconds=pause)
                self.leader.not_serving = str(error)
            else:
                return

    async def stop(self) -> None:
        self.leader.stop_serving("shutting down")
        await self.links.stop(self._cluster.deadlines.stop)

    def _split_layers(self) -> bool:
        """Decides which layers each stage gets, by what the workers have measured. Returns whether that is new."""
        config, ready = self.configs[0], self.links.ready
        first_ranks = [ready[stage * config.tp] for stage in range(config.pp)]
        seconds = [taken for rank in first_ranks for taken in rank.layer_seconds]
        if len(seconds) != config.geometry.num_layers:
            # Emulated stages have no layers.
            return False
        self._boundaries = partition(
            seconds, config.pp, first=first_ranks[0].beside_seconds, last=first_ranks[-1].beside_seconds
        )
        save_boundaries(config, self._boundaries)
        log.info(
            "layers were measured",
            boundaries=self._boundaries,
            layer_seconds=[round(taken, 6) for taken in seconds],
            first_seconds=round(first_ranks[0].beside_seconds, 6),
            last_seconds=round(first_ranks[-1].beside_seconds, 6),
        )
        return self._boundaries != list(config.layer_boundaries)

    async def _learn_costs(self) -> None:
        config, leader = self.configs[0], self.leader
        path = saved_at(config)
        samples = load(path, config.pp)
        if samples is None:
            capacity = config.num_pages * config.geometry.page_size
            points = profile_points(min(capacity, config.geometry.max_context_tokens), config.chunk_tokens)

            def progress(detail: str) -> None:
                leader.not_serving = detail

            measuring = asyncio.ensure_future(
                measure(self.links, config, points, seconds=_PROFILE_SECONDS, progress=progress)
            )
            if not await _first(asyncio.wait({measuring}), self.lost):
                measuring.cancel()
                raise PeerUnavailable("a worker was lost while the group was profiled.")
            samples, num_steps = measuring.result()
            leader.scheduler.begin_at(num_steps)
            save(path, samples)
        leader.cost.learn(samples)
        for stage, (cost, measured) in enumerate(zip(leader.cost.group.stages, samples, strict=True)):
            log.info(
                "costs",
                stage=stage,
                **dataclasses.asdict(cost),
                relative_error=round(relative_error(cost, measured), 4),
                file=str(path),
            )


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """`PrefillService` over the group's current leader."""

    def __init__(self, group: Group, metrics_address: str) -> None:
        self._group = group
        self._metrics = metrics_address

    def Prefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        if self._group.draining:
            raise PeerUnavailable("the prefill group is draining: it takes no new requests; use another one.")
        return traced_prefill(self._group.leader, request, tracing.caller(context))

    async def DrainPrefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.DrainPrefillRequest, context: object
    ) -> prefill_pb2.DrainPrefillResponse:
        log.info("draining" if request.draining else "taking requests again")
        self._group.draining = request.draining
        return prefill_pb2.DrainPrefillResponse()

    async def Redirect(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.RedirectRequest, context: object
    ) -> prefill_pb2.RedirectResponse:
        self._group.leader.redirect(request.request_id, request.grant)
        return prefill_pb2.RedirectResponse()

    async def TracePrefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.TracePrefillRequest, context: object
    ) -> prefill_pb2.TracePrefillResponse:
        leader = self._group.leader
        trace = leader.history.trace(request.request_id, leader.num_stages)
        if trace is None:
            raise InvalidRequest(
                f"request {request.request_id} is not known here: it was another group's, or is too long ago."
            )
        return trace

    async def DescribePrefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.DescribePrefillRequest, context: object
    ) -> prefill_pb2.DescribePrefillResponse:
        group, leader = self._group, self._group.leader
        config, scheduler = group.configs[0], leader.scheduler
        pool = scheduler.pool
        ready = group.links.ready
        backlog_seconds = scheduler.backlog_seconds
        metrics.BACKLOG_SECONDS.set(backlog_seconds)
        return prefill_pb2.DescribePrefillResponse(
            name=config.group,
            epoch=config.epoch,
            serving=not leader.not_serving and not group.draining,
            detail=leader.not_serving or ("draining" if group.draining else ""),
            draining=group.draining,
            geometry=config.geometry,
            pp=config.pp,
            tp=config.tp,
            layer_boundaries=config.layer_boundaries,
            chunk_tokens=config.chunk_tokens,
            capacity_tokens=pool.num_pages * pool.page_size,
            free_tokens=pool.free_pages * pool.page_size,
            queued_requests=scheduler.num_queued,
            running_requests=scheduler.num_running,
            transport=ready[0].transport if 0 in ready else "",
            metrics_addresses=[self._metrics, *(ready[rank].metrics_address for rank in sorted(ready))],
            chunk_policy=config.chunk_policy,
            costs=[
                common_pb2.StageCost(**dataclasses.asdict(cost))
                for cost in (leader.cost.group.stages if leader.cost.measured else ())
            ],
            backlog_tokens=scheduler.backlog_tokens,
            backlog_seconds=backlog_seconds,
            transfer_seconds=leader.transfer_seconds,
            prefix_cache=prefill_pb2.PrefixCache(
                cached_tokens=pool.cached_pages * pool.page_size,
                query_tokens=scheduler.query_tokens,
                hit_tokens=scheduler.hit_tokens,
            )
            if pool.keeps_prefixes
            else None,
        )


class _CurrentLinks(worker_pb2_grpc.WorkerServiceServicer):
    """`WorkerService` over the group's current links."""

    def __init__(self, group: Group) -> None:
        self._group = group

    async def Join(  # noqa: N802 - gRPC's name
        self, request: worker_pb2.JoinRequest, context: object
    ) -> worker_pb2.JoinResponse:
        return self._group.links.join(request)


async def serve(cluster: Cluster, name: str) -> int:
    """Runs the leader of group `name` until SIGTERM or SIGINT. Returns the exit code.

    Raises:
        InvalidConfig, ModelFolderError, UnsupportedModel: before anything is started.
        PeerUnavailable, DeadlinePassed: the workers did not come up; everything started is stopped again.
    """
    section = cluster.prefill_named(name)
    folder = read_model_folder(Path(cluster.model.path))
    check_parallel(folder, section.pp, section.tp)
    if folder.has_latent_kv:
        raise UnsupportedModel(
            f"{folder.architecture} caches a latent (MLA), which chunked prefill does not compute yet; "
            "serve a model that caches keys and values."
        )
    server = Server(section.address, ["headwater.v1.PrefillService", "headwater.v1.WorkerService"])
    exporter = MetricsServer(
        section.address.rpartition(":")[0],
        section.metrics_port,
        role="prefill",
        node=name,
        config={
            "pp": section.pp,
            "tp": section.tp,
            "device": section.device,
            "chunk_policy": section.chunk_policy,
            "chunk_tokens": section.chunk_tokens,
            "page_size": section.page_size,
        },
    )
    group = Group(cluster, section, folder, server.address, exporter.address)
    stopping = Stopping()
    stop = stopping.asked
    joined = contextlib.AsyncExitStack()
    try:
        servicer = PrefillServicer(group, exporter.address)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.grpc_server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_CurrentLinks(group), server.grpc_server)
        await server.start()
        # Workers that do not come up at first are a mistake in the configuration, which trying again would hide.
        up = await _first(group.start(), stop)
        where = router_pb2.RegisterRequest(name=name, role="prefill", address=server.address)
        await joined.enter_async_context(registered(cluster.routers if up else (), where))
        while up:
            await server.set_serving(serving=True)
            if not await _first(group.lost.wait(), stop):
                break
            await server.set_serving(serving=False)
            up = await _first(group.restart(), stop)
        if up:
            group.draining = True
            await server.set_serving(serving=False)
            await stopping.drain(group.leader.idle.wait(), cluster.deadlines.drain)
    finally:
        await joined.aclose()
        await group.stop()
        await server.stop(cluster.deadlines.stop)
        exporter.stop()
    return 0


async def _first(work: Coroutine[Any, Any, object], stop: asyncio.Event) -> bool:
    """Awaits `work` unless `stop` is set first. True when the work ended; its exceptions are raised."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
