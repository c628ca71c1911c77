"""The transfer state machine under random faults: a short, repeatable part of `python -m tests.campaign transfer`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kv_transfer.session import ReceiverState
from tests.kv_transfer.machine import SOURCES, TARGETS, TransferMachine
from tests.kv_transfer.world import Shape


def test_transfers_under_random_faults() -> None:
    run_state_machine_as_test(
        TransferMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            # Half of what happens is up to the machine, so a shorter history would seldom fail again.
            phases=[Phase.generate],
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # It gets somewhere; what exactly happens differs with the machine's speed.
    assert TransferMachine.happened["committed"] > 0
    assert TransferMachine.happened["runs"] >= 30


@pytest.mark.parametrize("target", TARGETS)
def test_one_history_in_which_another_group_goes_on_half_way(target: Shape) -> None:
    machine = TransferMachine()
    machine.prefill_starts(SOURCES[0])
    machine.decode_starts(target)
    machine.submit(0, 24)
    before = machine.happened["taken over half way"]
    machine.prefill_dies_half_way_and_another_goes_on(0, SOURCES[1])
    machine.rest(0)
    run = machine.runs[0]
    machine.teardown()
    assert machine.happened["taken over half way"] == before + 1
    assert {incoming.session.state for incoming in run.transfer.incoming} == {ReceiverState.COMMITTED}
