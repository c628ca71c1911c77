"""The leader process of one prefill group: what it is made of, how it starts and how it ends."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from headwater.cluster import Cluster, Prefill
from headwater.errors import UnsupportedModel
from headwater.lifecycle import get_logger
from headwater.rpc import Server
from headwater.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from kv_transfer.geometry import geometry_of
from kv_transfer.metrics_server import MetricsServer
from kv_transfer.model_folder import ModelFolder, check_parallel, layer_boundaries, read_model_folder
from prefill_node.leader import Leader
from prefill_node.links import WorkerLinks, WorkerServicer
from prefill_node.pages import PagePool
from prefill_node.scheduler import Scheduler

log = get_logger(__name__)

# Steps sent beyond the pipeline's depth, so that a stage never waits for the leader.
LOOK_AHEAD = 1


def worker_configs(cluster: Cluster, group: Prefill, folder: ModelFolder, epoch: str) -> list[worker_pb2.WorkerConfig]:
    """What each rank must know, in rank order; rank = stage · tp + tensor rank."""
    boundaries = layer_boundaries(folder.num_layers, group.pp, group.layer_splits)
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
            transport=group.transport,
            send_buffer_bytes=group.send_buffer_mb * 1024 * 1024,
            log_level=cluster.log_level,
            max_context_tokens=cluster.model.max_context_tokens or 0,
            write_seconds=cluster.deadlines.write,
            reply_seconds=cluster.deadlines.reply,
            acknowledge_seconds=cluster.deadlines.acknowledge,
            step_seconds=cluster.deadlines.step,
        )
        for rank in range(group.pp * group.tp)
    ]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """`PrefillService` over a `Leader`."""

    def __init__(self, leader: Leader, links: WorkerLinks, config: worker_pb2.WorkerConfig, metrics: str) -> None:
        self._leader = leader
        self._links = links
        self._config = config
        self._metrics = metrics

    def Prefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        return self._leader.prefill(request)

    async def Redirect(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.RedirectRequest, context: object
    ) -> prefill_pb2.RedirectResponse:
        self._leader.redirect(request.request_id, request.grant)
        return prefill_pb2.RedirectResponse()

    async def DescribePrefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.DescribePrefillRequest, context: object
    ) -> prefill_pb2.DescribePrefillResponse:
        config, scheduler = self._config, self._leader.scheduler
        pool = scheduler.pool
        ready = self._links.ready
        return prefill_pb2.DescribePrefillResponse(
            name=config.group,
            epoch=config.epoch,
            serving=not self._leader.not_serving,
            detail=self._leader.not_serving,
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
        )


async def serve(cluster: Cluster, name: str) -> int:
    """Runs the leader of group `name` until SIGTERM or SIGINT. Returns the exit code.

    Raises:
        InvalidConfig, ModelFolderError, UnsupportedModel: before anything is started.
        PeerUnavailable, DeadlinePassed: the workers did not come up; everything started is stopped again.
    """
    group = cluster.prefill_named(name)
    folder = read_model_folder(Path(cluster.model.path))
    check_parallel(folder, group.pp, group.tp)
    if folder.has_latent_kv:
        raise UnsupportedModel(
            f"{folder.architecture} caches a latent (MLA), which chunked prefill does not compute yet; "
            "serve a model that caches keys and values."
        )
    configs = worker_configs(cluster, group, folder, epoch=secrets.token_hex(8))
    world_size = len(configs)
    leader = Leader(
        Scheduler(
            PagePool(configs[0].num_pages, group.page_size),
            chunk_tokens=group.chunk_tokens,
            max_in_flight=group.pp + LOOK_AHEAD,
            max_running=group.max_running_requests,
            max_queued=group.max_queued_requests,
            world_size=world_size,
        ),
        configs[0].geometry,
        cluster.deadlines.resume,
    )
    host = group.address.rpartition(":")[0]
    hosts = group.hosts or (host,)
    server = Server(group.address, ["headwater.v1.PrefillService", "headwater.v1.WorkerService"])
    lost = asyncio.Event()

    def on_lost(reason: str) -> None:
        leader.stop_serving(reason)
        lost.set()

    links = WorkerLinks(
        configs,
        local_ranks=[rank for rank in range(world_size) if hosts[rank * len(hosts) // world_size] == host],
        start_seconds=cluster.deadlines.worker_start,
        on_report=leader.on_report,
        on_lost=on_lost,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = MetricsServer(host, group.metrics_port)
    try:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(
            PrefillServicer(leader, links, configs[0], metrics.address), server.grpc_server
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(links), server.grpc_server)
        await server.start()
        if await _first(links.start(server.address), stop):
            leader.begin(links)
            await server.set_serving(serving=True)
            log.info("serving", address=server.address, metrics=metrics.address, pp=group.pp, tp=group.tp)
            await _first(lost.wait(), stop)
            await server.set_serving(serving=False)
            # Without its workers the group cannot serve, but it stays to say so.
            await stop.wait()
    finally:
        leader.stop_serving("shutting down")
        await links.stop(cluster.deadlines.stop)
        await server.stop(cluster.deadlines.stop)
        metrics.stop()
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
