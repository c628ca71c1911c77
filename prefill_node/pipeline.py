"""The ranks' place in the group, and activations from stage to stage.

Rank = stage · tp + tensor rank. Each tensor rank sends to its namesake in the next stage. Sends are never
waited for until their buffer would be one too many; receives are posted as soon as the step is known.
Control never shares this channel.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import os
import socket

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not in __all__
from torch.distributed.device_mesh import DeviceMesh

from headwater.errors import InvalidConfig


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    rank: int
    pp: int
    tp: int

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tp

    @property
    def world_size(self) -> int:
        return self.pp * self.tp

    @property
    def previous(self) -> int | None:
        return self.rank - self.tp if self.stage > 0 else None

    @property
    def following(self) -> int | None:
        return self.rank + self.tp if self.stage < self.pp - 1 else None

    @property
    def samples(self) -> bool:
        """Whether this is the rank that samples and reports: the first of the last stage."""
        return self.following is None and self.tensor_rank == 0


def listen_for_store(host: str) -> socket.socket:
    """A socket for the rendezvous store, bound to `host` only (the store by itself binds to every address)."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen()
    return listener


def join(
    place: Place,
    *,
    host: str,
    store_host: str,
    store_port: int,
    listener: socket.socket | None,
    backend: str,
    seconds: float,
) -> DeviceMesh | None:
    """Forms the process group. Returns the mesh of this stage's tensor ranks, or None when tp is 1.

    Args:
        host: this rank's own address; gloo uses its interface.
        listener: rank 0's socket for the store; None on the others.
        backend: "gloo" or "nccl".
        seconds: deadline of every operation of the group.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _interface_of(host)
    timeout = datetime.timedelta(seconds=seconds)
    store = TCPStore(
        store_host,
        store_port,
        place.world_size,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    if place.tp == 1:
        return None
    grid = torch.arange(place.world_size).view(place.pp, place.tp)
    device = "cuda" if backend == "nccl" else "cpu"
    return DeviceMesh(device, grid, mesh_dim_names=("pipeline", "tensor"))["tensor"]


def _interface_of(host: str) -> str:
    address = socket.gethostbyname(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    raise InvalidConfig(f"no network interface here has the address {address} ({host}); correct `hosts`.")


class Pipeline:
    """Point-to-point activations of one rank.

    Args:
        depth: sends that may be outstanding before the oldest is waited for.
    """

    def __init__(self, place: Place, hidden_size: int, dtype: torch.dtype, device: torch.device, depth: int) -> None:
        self._place = place
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._depth = depth
        self._sends: collections.deque[tuple[dist.Work, torch.Tensor]] = collections.deque()
        self._receives: collections.deque[tuple[dist.Work, torch.Tensor]] = collections.deque()

    def post(self, num_tokens: int) -> None:
        """Posts the receive of the next step's hidden states. No-op on the first stage."""
        if self._place.previous is None:
            return
        buffer = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, src=self._place.previous)
        if work is None:
            raise AssertionError("this rank is not in the process group")
        self._receives.append((work, buffer))

    def take(self) -> torch.Tensor:
        """Hidden states [T, hidden] of the oldest posted receive; waits for them."""
        work, buffer = self._receives.popleft()
        work.wait()
        return buffer

    def send(self, hidden: torch.Tensor) -> None:
        """Sends [T, hidden] to the next stage; returns at once unless `depth` sends are outstanding."""
        if self._place.following is None:
            raise AssertionError("the last stage sends nothing")
        while self._sends and (len(self._sends) >= self._depth or self._sends[0][0].is_completed()):
            work, _ = self._sends.popleft()
            work.wait()
        buffer = hidden.contiguous()
        sent = dist.isend(buffer, dst=self._place.following)
        if sent is None:
            raise AssertionError("this rank is not in the process group")
        self._sends.append((sent, buffer))

    def drain(self) -> None:
        """Waits for every send."""
        while self._sends:
            self._sends.popleft()[0].wait()
