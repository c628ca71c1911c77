"""`headwater check`: what can be known to be wrong with a cluster before anything is started."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from headwater.cluster import Cluster, Decode, Prefill
from headwater.errors import InvalidConfig, ModelFolderError
from headwater.rpc import require_free_port
from headwater.security import credentials
from headwater.v1 import common_pb2
from kv_transfer.geometry import CellSize, geometry_of
from kv_transfer.model_folder import ModelFolder, check_parallel, layer_boundaries, read_model_folder
from router.hosts import host_of, is_local
from router.text import load_text


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One process group as the cluster file means it."""

    name: str
    role: str
    address: str
    here: bool
    layout: str = ""
    capacity_tokens: int = 0
    # KV of the rank that holds most, in bytes.
    kv_bytes_per_rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What the cluster file means, what cannot work, and what will be refused while serving."""

    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check_cluster(cluster: Cluster) -> Report:
    """Looks at the cluster file, the model folder, and for what is placed here, cores and ports."""
    problems: list[str] = []
    folder: ModelFolder | None = None
    try:
        folder = read_model_folder(Path(cluster.model.path))
        load_text(folder.path)
    except ModelFolderError as error:
        problems.append(f"model: {error}")
    problems += _missing_roles(cluster)
    rows = [Row(cluster.router.name, "router", cluster.router.address, is_local(host_of(cluster.router.address)))]
    for group in cluster.prefill:
        problems += [f"prefill {group.name}: {problem}" for problem in _prefill_problems(cluster, group, folder)]
        rows.append(_prefill_row(cluster, group, folder))
    for node in cluster.decode:
        problems += [f"decode {node.name}: {problem}" for problem in _decode_problems(cluster, node, folder)]
        rows.append(_decode_row(cluster, node, folder))
    problems += [f"{row.role} {row.name}: {problem}" for row in rows if row.here for problem in _taken(row.address)]
    problems += [f"security: {problem}" for problem in _security_problems(rows)]
    return Report(tuple(rows), tuple(problems), tuple(_notes(cluster, folder)))


def _security_problems(rows: list[Row]) -> Iterator[str]:
    try:
        for server in (True, False):
            credentials().context(server=server)
        _ = credentials().token
        for row in rows:
            if row.here:
                credentials().check_listening(row.address)
    except InvalidConfig as error:
        yield str(error)


def _missing_roles(cluster: Cluster) -> list[str]:
    missing = []
    if not cluster.prefill:
        missing.append("the cluster file has no [[prefill]] group; without one nothing can be answered.")
    if not cluster.decode:
        missing.append("the cluster file has no [[decode]] node; without one answers end after their first token.")
    return missing


def _prefill_problems(cluster: Cluster, group: Prefill, folder: ModelFolder | None) -> Iterator[str]:
    world = group.pp * group.tp
    if group.pool_tokens < group.chunk_tokens:
        yield f"pool_tokens = {group.pool_tokens} cannot hold one chunk of chunk_tokens = {group.chunk_tokens}."
    if group.cores and len(group.cores) != world:
        yield f"cores lists {len(group.cores)} cores; give one for each of the {world} ranks (pp · tp), or none."
    if is_local(host_of(group.address)):
        yield from _unknown_cores(group.cores)
    if group.address.endswith(":0"):
        yield "the address leaves the port to the system; the router could not find it."
    for node in cluster.decode:
        if group.send_buffer_mb * 1024 < node.slot_kb:
            yield (
                f"send_buffer_mb = {group.send_buffer_mb} cannot hold one landing slot of {node.name} "
                f"(slot_kb = {node.slot_kb})."
            )
    if folder is not None:
        try:
            check_parallel(folder, group.pp, group.tp)
            layer_boundaries(folder.num_layers, group.pp, group.layer_splits)
        except InvalidConfig as error:
            yield str(error)


def _decode_problems(cluster: Cluster, node: Decode, folder: ModelFolder | None) -> Iterator[str]:
    if is_local(host_of(node.address)):
        yield from _unknown_cores(node.cores)
    if node.address.endswith(":0"):
        yield "the address leaves the port to the system; the router could not find it."
    smallest = min((group.chunk_tokens for group in cluster.prefill), default=0)
    if node.capacity_tokens <= smallest:
        yield f"capacity_tokens = {node.capacity_tokens} cannot hold one chunk ({smallest} tokens) and an answer."
    if node.slots_per_writer > node.num_slots:
        yield f"slots_per_writer = {node.slots_per_writer} is more than num_slots = {node.num_slots}."
    if folder is not None:
        cell = CellSize.of(_geometry(cluster, folder, node.dtype)).total
        if cell > node.slot_kb * 1024:
            yield f"slot_kb = {node.slot_kb} cannot hold one head of one token ({cell} bytes)."


def _notes(cluster: Cluster, folder: ModelFolder | None) -> Iterator[str]:
    for group in cluster.prefill:
        for node in cluster.decode:
            wanted = group.pp * group.tp * node.slots_per_writer
            if wanted > node.num_slots:
                yield (
                    f"the {group.pp * group.tp} ranks of {group.name} take {wanted} landing slots for one transfer, "
                    f"and {node.name} has {node.num_slots}: ranks will wait for each other."
                )
    if folder is None:
        return
    context = cluster.model.max_context_tokens or folder.max_context_tokens
    if context > folder.max_context_tokens:
        yield f"max_context_tokens = {context} is beyond the {folder.max_context_tokens} that the model was built for."
    for name, capacity in (
        *((group.name, group.pool_tokens) for group in cluster.prefill),
        *((node.name, node.capacity_tokens) for node in cluster.decode),
    ):
        if capacity < context:
            yield f"{name} holds {capacity} tokens: longer requests are refused, although the context is {context}."


def _unknown_cores(cores: tuple[int, ...]) -> list[str]:
    usable = os.sched_getaffinity(0)
    unknown = [core for core in cores if core not in usable]
    if not unknown:
        return []
    return [f"cores {unknown} cannot be used here; this host offers {sorted(usable)}."]


def _taken(address: str) -> list[str]:
    try:
        require_free_port(address)
    except InvalidConfig as error:
        return [str(error)]
    return []


def _geometry(cluster: Cluster, folder: ModelFolder, dtype: str | None) -> common_pb2.Geometry:
    return geometry_of(folder, cluster.model, page_size=1, dtype=dtype)


def _prefill_row(cluster: Cluster, group: Prefill, folder: ModelFolder | None) -> Row:
    layout, kv_bytes = f"PP{group.pp} TP{group.tp}", 0
    if folder is not None and group.pp <= folder.num_layers:
        try:
            boundaries = layer_boundaries(folder.num_layers, group.pp, group.layer_splits)
        except InvalidConfig:
            boundaries = ()
        layers = max((end - start for start, end in itertools.pairwise(boundaries)), default=0)
        # MLA has one latent head, and every rank holds it.
        heads = -(-folder.num_kv_heads // group.tp)
        kv_bytes = group.pool_tokens * layers * heads * CellSize.of(_geometry(cluster, folder, group.dtype)).total
        if boundaries:
            layout += f", layers {' '.join(map(str, boundaries))}"
    here = is_local(host_of(group.address))
    return Row(group.name, "prefill", group.address, here, layout, group.pool_tokens, kv_bytes)


def _decode_row(cluster: Cluster, node: Decode, folder: ModelFolder | None) -> Row:
    kv_bytes = 0
    if folder is not None:
        cell = CellSize.of(_geometry(cluster, folder, node.dtype)).total
        kv_bytes = node.capacity_tokens * folder.num_layers * folder.num_kv_heads * cell
    here = is_local(host_of(node.address))
    return Row(node.name, "decode", node.address, here, "transformers", node.capacity_tokens, kv_bytes)
