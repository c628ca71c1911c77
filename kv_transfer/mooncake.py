"""The Mooncake Transfer Engine. The only file that imports Mooncake.

Facts this wrapper rests on (wheel 0.3.13.post1; measured here, or read in its source where that is said):
- The wheel ignores its protocol argument: it uses RDMA when it finds a device that it can open, unless MC_FORCE_TCP
  is set while initialising, and TCP otherwise, without saying so. A device may be listed and closed to this process (a
  container without /dev/infiniband). So the choice is made here, what came of it is read from the files that the engine
  has opened, and RDMA that was asked for and cannot be had is refused.
- A write that reports failure may still land later, over TCP and RDMA alike.
- Over TCP the receiver checks the destination once, when the write's header arrives. Unregistering the memory
  refuses later writes, and does not stop one that is being received: it lands to its end and reports success.
  What stops it is the end of its connection: when the receiving side shuts that down, nothing lands after it, and
  the writer is told at once. Over RDMA unregistering is a complete fence (tests/rdma), and a process that is stopped
  goes on being written to.
- Over TCP this wheel keeps connections for later writes unless MC_TCP_ENABLE_CONNECTION_POOL=0, which is set here:
  with one connection for each write a late one can be cut without harm to others, at the same speed.
- `transfer_submit_write` and `transfer_check_status` do not block, release the GIL, and report one write each;
  its source is read no more once the status is not 0 (source). The blocking calls spin on a core.
- One mutex is held while a peer is contacted for the first time, and every other write waits for it (source).
  `send_probe` takes no lock, so a peer is probed first and contacted only when it has just answered. What is left: a
  peer that stops between that answer and the first write to it holds up new writes to all peers, for 60 s at most.
- What is known of a peer is cached by name for ever (source). A new process that got the port of an earlier
  one is reached through a second engine object, which knows nothing of the first.
- It listens on all addresses, whatever host name it is given (MC_TCP_BIND_ADDRESS does not change that).
  Keep its ports behind the cluster's firewall.
- It reads its settings from the environment, some at import and some while initialising.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from headwater.errors import InvalidConfig, PeerUnavailable, TransferFailed
from headwater.lifecycle import get_logger
from kv_transfer import metrics
from kv_transfer.engine import WriteFailed, WriteState

log = get_logger(__name__)

_FENCE_POLL_SECONDS = 0.02
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
        write_seconds: no healthy write takes longer; what a fence waits for before it cuts connections.
    """

    def __init__(self, host: str, transport: str, write_seconds: float) -> None:
        self._wanted = transport
        self.transport = choose_transport(transport, active_rdma_devices())
        self._host = host
        self._write_seconds = write_seconds
        self._lock = threading.Lock()
        self._registered: dict[int, int] = {}
        self._closing = threading.Event()
        self._epochs: dict[str, str] = {}
        # Peers that could not be written to, and must answer before the next try.
        self._doubtful: set[str] = set()
        self._handles = itertools.count(1)
        self._batches: dict[int, tuple[Any, int]] = {}
        before = _listening_ports()
        self._engine = self._start()
        # Where peers' writes arrive; the rest of this process's sockets are none of this class's business.
        self._ports = _listening_ports() - before
        self._initiators: dict[str, Any] = {}
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        metrics.TRANSPORT.info({"transport": self.transport})

    def _start(self) -> Any:
        # Mooncake has no other way to be told. Quiet by default; MC_LOG_LEVEL of the environment wins.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("GLOG_minloglevel", "2")
        # The list of regions that a peer asks for: more than ten thousand of them exceed the default of 1 MB.
        os.environ.setdefault("MC_HANDSHAKE_MAX_LENGTH", str(64 * 1024 * 1024))
        os.environ["MC_TCP_ENABLE_CONNECTION_POOL"] = "0"
        try:
            from mooncake.engine import TransferEngine  # noqa: PLC0415 - settings above are read at import
        except ImportError as error:
            raise InvalidConfig(
                f"cannot import Mooncake: {error}. It needs the system libraries libibverbs1, librdmacm1 and libnuma1 "
                "even for TCP (apt-get install libibverbs1 librdmacm1 libnuma1), and one of the wheels "
                "mooncake-transfer-engine-non-cuda or mooncake-transfer-engine-cuda13."
            ) from error
        engine = TransferEngine()
        os.environ.pop("MC_FORCE_TCP", None)
        if self.transport == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"
        devices = _open_rdma_files()
        try:
            status = engine.initialize(self._host, "P2PHANDSHAKE", self.transport, "")
        finally:
            os.environ.pop("MC_FORCE_TCP", None)
        if status != 0:
            raise InvalidConfig(f"Mooncake could not start on {self._host} over {self.transport} (status {status}).")
        if self.transport == "rdma" and _open_rdma_files() == devices:
            if self._wanted == "rdma":
                raise InvalidConfig(
                    'transport = "rdma", and Mooncake could not open the RDMA device, though it is listed as active. '
                    "Give this process access to /dev/infiniband (in a container: --device=/dev/infiniband), or set "
                    'transport = "tcp" or "auto".'
                )
            log.warning("the RDMA device cannot be opened; using TCP")
            self.transport = "tcp"
        return engine

    def register(self, address: int, num_bytes: int) -> None:
        status = self._engine.register_memory(address, num_bytes)
        if status != 0:
            raise InvalidConfig(
                f"Mooncake refused to register {num_bytes} bytes (status {status}); -7 means that the range overlaps "
                "one that is registered."
            )
        with self._lock:
            self._registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        with self._lock:
            if self._registered.pop(address, None) is None:
                return
            engines = [self._engine, *self._initiators.values()]
        # All of them, even when one fails.
        statuses = [engine.unregister_memory(address) for engine in engines]
        if any(statuses):
            raise TransferFailed(f"Mooncake could not unregister memory (status {max(statuses, key=abs)}).")

    def fence(self, address: int) -> None:
        self.unregister(address)
        if self.transport == "rdma":
            return
        # Any of these may be the late one, and all others end by themselves.
        suspects = self._arriving()
        deadline = time.monotonic() + self._write_seconds
        while suspects and time.monotonic() < deadline and not self._closing.wait(_FENCE_POLL_SECONDS):
            suspects &= self._arriving()
        if suspects:
            log.warning("cutting connections of writes that did not end", connections=len(suspects))
        while suspects and not self._closing.is_set():
            self._cut(suspects)
            time.sleep(_FENCE_POLL_SECONDS)
            suspects &= self._arriving()

    def _arriving(self) -> set[tuple[Any, Any]]:
        """Connections, (local address, peer's address), over which writes reach this process now."""
        return {
            (found.laddr, found.raddr)
            for found in psutil.Process().net_connections(kind="tcp")
            if len(found.raddr) and found.laddr.port in self._ports
        }

    @staticmethod
    def _cut(connections: set[tuple[Any, Any]]) -> None:
        """Shuts connections down. Mooncake closes them itself once it has noticed."""
        for found in psutil.Process().net_connections(kind="tcp"):
            if (found.laddr, found.raddr) not in connections or found.fd < 0:
                continue
            # The number may have been taken over by another file meanwhile: ask the copy whose it is.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as copy:
                if copy.getpeername()[:2] == tuple(found.raddr) and copy.getsockname()[:2] == tuple(found.laddr):
                    copy.shutdown(socket.SHUT_RDWR)

    def contact(self, session: str, epoch: str) -> None:
        known = self._epochs.get(session)
        if known == epoch and session not in self._doubtful:
            return
        status = self._engine.send_probe(session)
        if status != 0:
            raise PeerUnavailable(
                f"transfer engine {session} does not answer (status {status}). Is the process alive, and does the "
                "network let its ports through?"
            )
        self._doubtful.discard(session)
        if known not in (None, epoch):
            log.info("a new process has the name of an earlier one", peer=session, epoch=epoch)
            fresh = self._start()
            with self._lock:
                for address, num_bytes in self._registered.items():
                    fresh.register_memory(address, num_bytes)
                self._initiators[session] = fresh
        self._epochs[session] = epoch

    def submit(self, session: str, source: int, destination: int, num_bytes: int) -> int:
        engine = self._initiators.get(session, self._engine)
        batch = engine.transfer_submit_write(session, source, destination, num_bytes)
        if batch == 0:
            self._doubtful.add(session)
            raise WriteFailed(
                f"Mooncake could not write {num_bytes} bytes to {session} over {self.transport}. "
                "Is the decode node alive, and does the network let its ports through?"
            )
        with self._lock:
            handle = next(self._handles)
            self._batches[handle] = (engine, batch)
        return handle

    def poll(self, handle: int) -> WriteState:
        with self._lock:
            engine, batch = self._batches[handle]
        status = engine.transfer_check_status(batch)
        # 0 is pending. -2 is a slice that timed out, and stays with the engine like a pending one.
        if status in (0, -2):
            return WriteState.PENDING
        # Mooncake has freed the batch: nobody may name it again.
        with self._lock:
            del self._batches[handle]
        return WriteState.DONE if status == 1 else WriteState.FAILED

    def close(self) -> None:
        # A fence under way ends: nobody will be given any memory of this process any more.
        self._closing.set()
        for address in list(self._registered):
            self.unregister(address)


def _open_rdma_files() -> int:
    """How many files of RDMA devices this process has open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        # One that is closed meanwhile, such as that of the listing itself, is none.
        with contextlib.suppress(OSError):
            count += str(entry.readlink()).startswith("/dev/infiniband/")
    return count


def _listening_ports() -> set[int]:
    return {
        found.laddr.port for found in psutil.Process().net_connections(kind="tcp") if found.status == psutil.CONN_LISTEN
    }
