"""How a process ends: the first SIGTERM or SIGINT drains it, the second ends it at once. Exit code 0 either way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from headwater.lifecycle import get_logger

log = get_logger(__name__)


class Stopping:
    """The signals of this process, from the moment it is made. Used from one event loop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._at_once = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        if self.asked.is_set():
            self._at_once.set()
        self.asked.set()

    async def drain(self, idle: Coroutine[Any, Any, object], seconds: float) -> None:
        """Waits until `idle` ends, `seconds` are over (deadlines.drain), or a second signal comes."""
        log.info("draining", deadline="deadlines.drain", seconds=seconds)
        ending, hurry = asyncio.ensure_future(idle), asyncio.ensure_future(self._at_once.wait())
        waits: set[asyncio.Future[Any]] = {ending, hurry}
        _, late = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if ending in late:
            log.warning("not everything had ended when the process did", after_second_signal=hurry.done())
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
