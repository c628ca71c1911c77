"""The guest's two RDMA devices, one at each end of a virtual cable (made by guest/network.sh)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The largest payload of a packet. A write of n bytes takes at least n / PAYLOAD_BYTES packets.
PAYLOAD_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class End:
    """One end of the cable."""

    device: str
    host: str
    interface: str

    def packets_sent(self) -> int:
        counter = Path("/sys/class/infiniband", self.device, "ports/1/hw_counters/sent_pkts")
        return int(counter.read_text())

    def use(self) -> None:
        """Makes this end's device the only one that Mooncake engines of this process find. Otherwise they take
        either, and what goes from a device to itself never comes to the cable.
        """
        topology = Path(tempfile.gettempdir(), f"{self.device}.json")
        topology.write_text(json.dumps({"cpu:0": [[self.device], []]}))
        os.environ["MC_CUSTOM_TOPO_JSON"] = str(topology)


SENDING = End("rxe0", "10.77.0.1", "eth0")
RECEIVING = End("rxe1", "10.77.0.2", "eth1")


@contextlib.contextmanager
def hidden_devices() -> Iterator[None]:
    """Nobody can open an RDMA device. /sys goes on naming them."""
    folder = Path("/dev/infiniband")
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    try:
        yield
    finally:
        elsewhere.rename(folder)


# Slow enough for a few megabytes to take seconds, and fast enough that the packets which a queue pair may have under
# way (64) are not taken for lost ones.
_SLOW = "60mbit"
# Packets that wait for their turn; none is dropped.
_QUEUE = "30000"


@contextlib.contextmanager
def slow_wire() -> Iterator[None]:
    """About 7 MB/s in both directions."""
    for end in (SENDING, RECEIVING):
        _queue(end, "netem", "limit", _QUEUE, "rate", _SLOW)
    try:
        yield
    finally:
        clear_wire()


@contextlib.contextmanager
def cut_wire() -> Iterator[None]:
    """Nothing arrives. Afterwards the wire is at full speed."""
    for end in (SENDING, RECEIVING):
        _queue(end, "netem", "loss", "100%")
    try:
        yield
    finally:
        clear_wire()


def clear_wire() -> None:
    """Full speed, whatever was before."""
    for end in (SENDING, RECEIVING):
        _queue(end, "noqueue")


def _queue(end: End, *discipline: str) -> None:
    subprocess.run(["tc", "qdisc", "replace", "dev", end.interface, "root", *discipline], check=True)
