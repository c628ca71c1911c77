"""Runs a command that ends with its parent: `python tether.py PARENT_PID COMMAND…`.

The kernel sends the command SIGTERM when the thread that started it is gone, even by SIGKILL. This is a
program and not a `preexec_fn`, because Python code between fork and exec may deadlock in a process with
threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        # It went before the kernel was told.
        sys.exit(f"{command[0]}: the parent is gone")
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
