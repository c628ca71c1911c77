"""Runs scenarios in the guest, each in processes of its own: `python -m tests.rdma.guest [smoke|full|SCENARIO…]`."""

from __future__ import annotations

import os
import sys
import time

from tests.rdma.link import clear_wire
from tests.rdma.peer import FORK, Peers
from tests.rdma.say import say
from tests.rdma.scenarios import perform

SMOKE = ("transports", "staged", "fence", "late_write")
FULL = (
    *SMOKE,
    "unusable_device",
    "direct",
    "failing_entry",
    "receiver_killed",
    "receiver_stopped",
    "receiver_hangs",
    "receiver_hangs_direct",
    "receiver_silent",
)
# Of one scenario. Nothing here is expected to come near it.
_LIMIT_SECONDS = 150.0


def main(arguments: list[str]) -> int:
    names = {"smoke": SMOKE, "full": FULL}.get(arguments[0], tuple(arguments))
    failed = [name for name in names if not _passes(name)]
    say(f"FAILED: {', '.join(failed)}" if failed else f"{len(names)} scenarios passed")
    return 1 if failed else 0


def _passes(name: str) -> bool:
    say(f"SCENARIO {name}")
    clear_wire()
    started = time.monotonic()
    with Peers() as peers:
        process = FORK.Process(target=_perform, args=(name, peers))
        process.start()
        process.join(_LIMIT_SECONDS)
        if process.exitcode is None:
            say(f"CHECK failed  {name} ends within {_LIMIT_SECONDS:g} s")
            process.kill()
            process.join()
    say(f"{'passed' if process.exitcode == 0 else 'FAILED'} in {time.monotonic() - started:.1f} s")
    return process.exitcode == 0


def _perform(name: str, peers: Peers) -> None:
    passed = perform(name, peers)
    # Mooncake's threads would keep a process that ends in the usual way.
    os._exit(0 if passed else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
