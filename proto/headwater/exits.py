"""How the `headwater` command ends: every exit code and what it says."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from headwater.errors import HeadwaterError, LocalError


class Exit(enum.IntEnum):
    """See `MEANINGS`."""

    DONE = 0
    PEER = 1
    LOCAL = 2
    LEADER_LOST = 75
    INTERRUPTED = 130


MEANINGS: Mapping[Exit, str] = MappingProxyType(
    {
        Exit.DONE: "done; a server: it was told to stop, and has",
        Exit.PEER: "another process failed, was not reached, or had no room: the same may work later",
        Exit.LOCAL: "the command, the cluster file, the model folder or the request is wrong",
        Exit.LEADER_LOST: "prefill worker: its leader is gone; start it again",
        Exit.INTERRUPTED: "interrupted by Ctrl-C",
    }
)


def exit_of(error: HeadwaterError) -> Exit:
    """What a command returns that ends with `error`."""
    return Exit.LOCAL if isinstance(error, LocalError) else Exit.PEER
