"""The transfer state machine, one table per side.

A machine has one state; an event that the table does not list for it raises and changes nothing. Every
transfer ends in exactly one terminal state on each side.

    receiver   granted ──open──▶ receiving ──commit──▶ committed
                  ▲  │               │ suspend
                  └──┼──regrant──────┴─────▶ suspended ──expire──▶ failed
                     └──fail / abort──▶ failed / aborted (also from receiving and suspended)

A transfer whose attempt was lost is suspended: what is verified stays for a bounded time, and a regrant lets
the next attempt go on from there.

    sender     opening ──opened──▶ sending ──close──▶ draining ──delivered──▶ delivered
                  └─────────fail / abort──┴──────────────┴──────────────────▶ failed / aborted
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from headwater.errors import IllegalEvent


class ReceiverState(enum.Enum):
    """Of a transfer on the decode side."""

    GRANTED = "granted"
    RECEIVING = "receiving"
    SUSPENDED = "suspended"
    COMMITTED = "committed"
    FAILED = "failed"
    ABORTED = "aborted"


class ReceiverEvent(enum.Enum):
    """What can happen to a transfer on the decode side."""

    OPEN = "open"  # a writer opened its delivery
    RECEIPT = "receipt"  # a box was verified and unpacked
    COMMIT = "commit"  # full coverage, and the first token is known
    SUSPEND = "suspend"  # a writer was lost, gave up, or let the lease run out
    REGRANT = "regrant"  # the router starts the next attempt
    EXPIRE = "expire"  # nobody started the next attempt in time
    FAIL = "fail"  # a writer, a digest or the coverage failed
    ABORT = "abort"  # this side no longer wants the KV


class SenderState(enum.Enum):
    """Of one rank's share of a transfer."""

    OPENING = "opening"
    SENDING = "sending"
    DRAINING = "draining"
    DELIVERED = "delivered"
    FAILED = "failed"
    ABORTED = "aborted"


class SenderEvent(enum.Enum):
    """What can happen to one rank's share of a transfer."""

    OPENED = "opened"  # the receiver granted slots
    CLOSE = "close"  # no more chunks will come
    DELIVERED = "delivered"  # every receipt acknowledged, closing confirmed
    FAIL = "fail"  # a write, the stream or the receiver failed
    ABORT = "abort"  # this side cancelled


_R, _RE, _S, _SE = ReceiverState, ReceiverEvent, SenderState, SenderEvent

RECEIVER_TABLE: Mapping[tuple[ReceiverState, ReceiverEvent], ReceiverState] = {
    (_R.GRANTED, _RE.OPEN): _R.RECEIVING,
    (_R.GRANTED, _RE.REGRANT): _R.GRANTED,
    (_R.GRANTED, _RE.FAIL): _R.FAILED,
    (_R.GRANTED, _RE.ABORT): _R.ABORTED,
    (_R.RECEIVING, _RE.OPEN): _R.RECEIVING,
    (_R.RECEIVING, _RE.RECEIPT): _R.RECEIVING,
    (_R.RECEIVING, _RE.COMMIT): _R.COMMITTED,
    (_R.RECEIVING, _RE.SUSPEND): _R.SUSPENDED,
    (_R.RECEIVING, _RE.REGRANT): _R.GRANTED,
    (_R.RECEIVING, _RE.FAIL): _R.FAILED,
    (_R.RECEIVING, _RE.ABORT): _R.ABORTED,
    (_R.SUSPENDED, _RE.REGRANT): _R.GRANTED,
    (_R.SUSPENDED, _RE.EXPIRE): _R.FAILED,
    (_R.SUSPENDED, _RE.FAIL): _R.FAILED,
    (_R.SUSPENDED, _RE.ABORT): _R.ABORTED,
}

SENDER_TABLE: Mapping[tuple[SenderState, SenderEvent], SenderState] = {
    (_S.OPENING, _SE.OPENED): _S.SENDING,
    (_S.OPENING, _SE.FAIL): _S.FAILED,
    (_S.OPENING, _SE.ABORT): _S.ABORTED,
    (_S.SENDING, _SE.CLOSE): _S.DRAINING,
    (_S.SENDING, _SE.FAIL): _S.FAILED,
    (_S.SENDING, _SE.ABORT): _S.ABORTED,
    (_S.DRAINING, _SE.DELIVERED): _S.DELIVERED,
    (_S.DRAINING, _SE.FAIL): _S.FAILED,
    (_S.DRAINING, _SE.ABORT): _S.ABORTED,
}

StateT = TypeVar("StateT", bound=enum.Enum)
EventT = TypeVar("EventT", bound=enum.Enum)


class Session(Generic[StateT, EventT]):
    """One side of one transfer."""

    def __init__(self, initial: StateT, table: Mapping[tuple[StateT, EventT], StateT], name: str) -> None:
        self.state = initial
        self._table = table
        self._name = name
        self._live = {state for state, _ in table}

    @property
    def terminal(self) -> bool:
        return self.state not in self._live

    def on(self, event: EventT) -> None:
        """Moves to the next state.

        Raises:
            IllegalEvent: the table has no such transition; the state is unchanged.
        """
        following = self._table.get((self.state, event))
        if following is None:
            raise IllegalEvent(
                f"transfer {self._name}: event {event.value!r} is not allowed in state {self.state.value!r}."
            )
        self.state = following


def receiver_session(name: str) -> Session[ReceiverState, ReceiverEvent]:
    return Session(ReceiverState.GRANTED, RECEIVER_TABLE, name)


def sender_session(name: str) -> Session[SenderState, SenderEvent]:
    return Session(SenderState.OPENING, SENDER_TABLE, name)
