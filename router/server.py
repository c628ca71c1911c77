"""The router process: its parts, in the order in which they start and stop.

Health: "" and RouterService are SERVING while the router takes requests, whatever its groups do: a request
that finds no group gets a typed error with the reason, and a router that withdrew could not give it. Each
group's name is a health service of its own, SERVING while the router hears from the group that it serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from headwater.cluster import Cluster
from headwater.lifecycle import get_logger
from headwater.rpc import Server
from headwater.security import credentials
from headwater.stopping import Stopping
from headwater.v1 import router_pb2, router_pb2_grpc
from kv_transfer.metrics_server import MetricsServer
from kv_transfer.model_folder import read_model_folder
from router.flow import Flow
from router.history import History
from router.page.routes import Routes
from router.page.server import PageServer
from router.page.view import describe_router
from router.pairing import Policies
from router.peers import Peers
from router.policies.named import POLICIES
from router.registry import Registry
from router.request import ServedModel
from router.service import RegistryServicer, RouterServicer
from router.snapshot import Snapshot
from router.text import load_text

log = get_logger(__name__)

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
REGISTRY = router_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name


def load_model(cluster: Cluster) -> ServedModel:
    """Reads what the router needs of the model folder.

    Raises:
        ModelFolderError: the folder cannot be used.
    """
    folder = read_model_folder(Path(cluster.model.path))
    return ServedModel(
        text=load_text(Path(cluster.model.path)),
        vocab_size=folder.vocab_size,
        max_context_tokens=cluster.model.max_context_tokens or folder.max_context_tokens,
        eos_token_ids=tuple(folder.eos_token_ids),
        tokenizer_fingerprint=folder.tokenizer_fingerprint,
    )


@contextlib.asynccontextmanager
async def running_router(cluster: Cluster, model: ServedModel, stopping: Stopping | None = None) -> AsyncIterator[str]:
    """A router that serves while the context lasts; gives its address.

    Args:
        stopping: leaving drains: no new request, and running ones get `deadlines.drain` to end, or until a second
            signal. None: they get `deadlines.stop`.

    Raises:
        InvalidConfig: an address cannot be listened on.
    """
    server = Server(cluster.router.address, [SERVICE, REGISTRY], credentials().token)

    async def on_change(snapshot: Snapshot) -> None:
        serving = {group.name: group.serving for group in snapshot.prefill}
        serving |= {group.name: group.serving for group in snapshot.decode}
        for name, reached in serving.items():
            await server.set_health(name, serving=reached)

    peers = Peers(cluster)
    history = History()
    registry = Registry(cluster, peers, model.tokenizer_fingerprint, on_change)
    async with contextlib.AsyncExitStack() as stack:
        metrics_server = MetricsServer(
            cluster.router.address.rpartition(":")[0],
            cluster.router.metrics_port,
            role="router",
            node=cluster.router.name,
            config={
                "prefill_policy": cluster.router.prefill_policy,
                "decode_policy": cluster.router.decode_policy,
                "model": Path(cluster.model.path).name,
            },
        )
        stack.callback(metrics_server.stop)
        stack.push_async_callback(peers.close)
        stack.push_async_callback(registry.stop)
        await registry.start()
        routes = Routes(
            describe_router(cluster.router.name, Path(cluster.model.path).name),
            metrics_server.address,
            registry,
            history,
            peers,
        )
        page = PageServer(cluster.router.page_address, routes.all(), routes.close, cluster.deadlines.stop)
        stack.push_async_callback(page.stop)
        await page.start()
        policies = Policies(POLICIES[cluster.router.prefill_policy], POLICIES[cluster.router.decode_policy])
        servicer = RouterServicer(
            Flow(
                model,
                registry,
                peers,
                cluster.deadlines,
                policies,
                history,
                max_waiting=cluster.router.max_waiting,
                local_prefill_tokens=cluster.router.local_prefill_tokens,
            ),
            registry,
            peers,
            metrics_server.address,
            page.address,
            max_requests=cluster.router.max_requests,
        )
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server.grpc_server)
        router_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryServicer(registry), server.grpc_server)
        stack.push_async_callback(servicer.close, cluster.deadlines.stop)
        stack.push_async_callback(server.stop, cluster.deadlines.stop)
        await server.start()
        await server.set_serving(serving=True)
        log.info("serving", address=server.address, metrics=metrics_server.address, page=page.address)
        yield server.address
        if stopping is not None:
            await server.set_serving(serving=False)
            await stopping.drain(servicer.drained(), cluster.deadlines.drain)
    log.info("stopped")


async def serve(cluster: Cluster) -> int:
    """Serves until SIGTERM or SIGINT, then drains. Returns the exit code.

    Raises:
        InvalidConfig, ModelFolderError: before anything is started.
    """
    stopping = Stopping()
    async with running_router(cluster, load_model(cluster), stopping):
        await stopping.asked.wait()
    return 0
