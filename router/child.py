"""One child process: started tethered to this one, its output kept, ended with all its descendants."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

# Lines of a child's log that an error shows.
_TAIL_LINES = 12
# For a process that has ended: until its last output has been read.
_LAST_OUTPUT_SECONDS = 1.0
_TETHER = Path(__file__).with_name("tether.py")


class Child:
    """A running command, leader of its own session and process group.

    Ends with the thread that made it, so make it in one that lives on.

    Args:
        command: the program's path and its arguments.
        environment: added to this process's own.
        log_file: takes its output; None: this process's standard error does, each line prefixed by the name.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_file: Path | None
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        tethered = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command]
        with contextlib.ExitStack() as stack:
            output: int | IO[bytes] = subprocess.PIPE
            if log_file is not None:
                output = stack.enter_context(log_file.open("wb"))
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                tethered,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        # Becomes readable when the process ends; until it is reaped its id is nobody else's.
        self.exit_descriptor = os.pidfd_open(self._process.pid)
        self._descendants: set[psutil.Process] = set()
        self._pump: threading.Thread | None = None
        if log_file is None:
            self._pump = threading.Thread(target=self._forward, name=f"output-{name}")
            self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float | None) -> bool:
        """Whether it ended within `seconds`. Does not reap it."""
        poll = select.poll()
        poll.register(self.exit_descriptor, select.POLLIN)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))

    def terminate(self) -> None:
        """Asks it to end (SIGTERM). Nothing happens when it has."""
        self.note_descendants()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit_descriptor, signal.SIGTERM)

    def note_descendants(self) -> None:
        """Remembers the processes below it: once it is gone, nobody can tell that they were its own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._descendants.update(psutil.Process(self.pid).children(recursive=True))

    def reap(self, seconds: float) -> list[int]:
        """Collects it, and ends with SIGKILL what is left of it and its descendants after `seconds`.

        Returns:
            The ids of the processes that had to be killed.
        """
        killed = []
        if not self.wait(seconds):
            killed.append(self.pid)
            signal.pidfd_send_signal(self.exit_descriptor, signal.SIGKILL)
        self._process.wait()
        os.close(self.exit_descriptor)
        _, left = psutil.wait_procs(self._descendants, timeout=max(0.0, seconds))
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed.append(process.pid)
        if self._pump is not None:
            self._pump.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return killed

    def describe_exit(self) -> str:
        """How it ended and the last lines of its log, once it has ended."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        killed = status is not None and status.si_code != os.CLD_EXITED
        number = 0 if status is None else status.si_status
        how = f"was ended by {signal.Signals(number).name}" if killed else f"exited with code {number}"
        lines = self._last_lines()
        return f"{self.name} {how}" + (f"; its last lines:\n{lines}" if lines else " and logged nothing")

    def _last_lines(self) -> str:
        if self._pump is not None:
            self._pump.join(_LAST_OUTPUT_SECONDS)
        if self.log_file is not None:
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        else:
            lines = list(self._tail)
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])

    def _forward(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode("utf-8", errors="replace").rstrip("\n")
            self._tail.append(line)
            sys.stderr.write(f"[{self.name}] {line}\n")
