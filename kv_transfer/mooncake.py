"""The Mooncake Transfer Engine. The only file that imports Mooncake.

Facts this wrapper rests on (wheel 0.3.13.post1, measured unless said otherwise):
- The wheel ignores its protocol argument: it uses RDMA when it finds a device, unless MC_FORCE_TCP is set
  while initialising, and TCP otherwise. So the choice is made here, and refused when it cannot be had.
- A write that reports failure may still land later, over TCP and RDMA alike.
- `transfer_sync_write` releases the GIL.
- It listens on all addresses, whatever host name it is given (MC_TCP_BIND_ADDRESS does not change that).
  Keep its ports behind the cluster's firewall.
- It reads its settings from the environment, some at import and some while initialising.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headwater.errors import InvalidConfig
from headwater.lifecycle import get_logger
from kv_transfer.engine import WriteFailed

log = get_logger(__name__)

_INFINIBAND = Path("/sys/class/infiniband")


def active_rdma_devices() -> list[str]:
    """Names of the RDMA devices that have an active port."""
    return sorted(
        {state.parts[-4] for state in _INFINIBAND.glob("*/ports/*/state") if "ACTIVE" in state.read_text()},
    )


def choose_transport(wanted: str, devices: list[str]) -> str:
    """What to use, "tcp" or "rdma", for the configured "auto", "tcp" or "rdma".

    Raises:
        InvalidConfig: RDMA was asked for and no device has an active port.
    """
    if wanted == "rdma" and not devices:
        raise InvalidConfig(
            'transport = "rdma", but no RDMA device here has an active port (see `ibv_devinfo`). '
            'Bring a port up, or set transport = "tcp" or "auto".'
        )
    return "rdma" if devices and wanted != "tcp" else "tcp"


class MooncakeEngine:
    """`TransferEngine` over Mooncake, with peer-to-peer handshakes (no metadata service).

    Args:
        host: this process's address as peers reach it.
        transport: "auto", "tcp" or "rdma", as in the cluster file.
        write_seconds: after this long a write is reported as failed (whole seconds, at least 5).
    """

    def __init__(self, host: str, transport: str, write_seconds: float) -> None:
        self.transport = choose_transport(transport, active_rdma_devices())
        # Mooncake has no other way to be told. Quiet by default; MC_LOG_LEVEL of the environment wins.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("GLOG_minloglevel", "2")
        os.environ["MC_TRANSFER_TIMEOUT"] = str(max(5, round(write_seconds)))
        try:
            from mooncake.engine import TransferEngine  # noqa: PLC0415 - settings above are read at import
        except ImportError as error:
            raise InvalidConfig(
                f"cannot import Mooncake: {error}. It needs the system libraries libibverbs1, librdmacm1 and libnuma1 "
                "even for TCP (apt-get install libibverbs1 librdmacm1 libnuma1), and one of the wheels "
                "mooncake-transfer-engine-non-cuda or mooncake-transfer-engine-cuda13."
            ) from error
        self._engine: Any = TransferEngine()
        if self.transport == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"
        try:
            status = self._engine.initialize(host, "P2PHANDSHAKE", self.transport, "")
        finally:
            os.environ.pop("MC_FORCE_TCP", None)
        if status != 0:
            raise InvalidConfig(f"Mooncake could not start on {host} over {self.transport} (status {status}).")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: set[int] = set()

    def register(self, address: int, num_bytes: int) -> None:
        status = self._engine.register_memory(address, num_bytes)
        if status != 0:
            raise InvalidConfig(
                f"Mooncake refused to register {num_bytes} bytes (status {status}); -7 means that the range overlaps "
                "one that is registered."
            )
        self._registered.add(address)

    def unregister(self, address: int) -> None:
        self._engine.unregister_memory(address)
        self._registered.discard(address)

    def write(self, session: str, source: int, destination: int, num_bytes: int) -> None:
        status = self._engine.transfer_sync_write(session, source, destination, num_bytes)
        if status != 0:
            raise WriteFailed(
                f"Mooncake could not write {num_bytes} bytes to {session} over {self.transport} (status {status}). "
                "Is the decode node alive, and does the network let its ports through?"
            )

    def close(self) -> None:
        for address in list(self._registered):
            self.unregister(address)
