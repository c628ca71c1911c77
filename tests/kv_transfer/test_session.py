"""The transfer state machines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headwater.errors import IllegalEvent
from kv_transfer.session import (
    RECEIVER_TABLE,
    SENDER_TABLE,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
    receiver_session,
    sender_session,
)


@pytest.mark.parametrize(
    ("make", "states", "events", "table"),
    [
        (receiver_session, ReceiverState, ReceiverEvent, RECEIVER_TABLE),
        (sender_session, SenderState, SenderEvent, SENDER_TABLE),
    ],
)
def test_only_the_table_moves_a_session(make: Any, states: Any, events: Any, table: Any) -> None:
    for state, event in itertools.product(states, events):
        session = make("t")
        session.state = state
        if (state, event) in table:
            session.on(event)
            assert session.state is table[state, event]
        else:
            with pytest.raises(IllegalEvent, match=f"'{event.value}' is not allowed in state '{state.value}'"):
                session.on(event)
            assert session.state is state


def test_terminal_states_allow_nothing() -> None:
    for table, terminal in (
        (RECEIVER_TABLE, {ReceiverState.COMMITTED, ReceiverState.FAILED, ReceiverState.ABORTED}),
        (SENDER_TABLE, {SenderState.DELIVERED, SenderState.FAILED, SenderState.ABORTED}),
    ):
        assert {state for state, _ in table}.isdisjoint(terminal)
        assert set(table.values()) - {state for state, _ in table} == terminal
