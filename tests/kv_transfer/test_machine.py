"""The transfer state machine under random faults: a short, repeatable part of `python -m tests.campaign transfer`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kv_transfer.machine import TransferMachine


def test_transfers_under_random_faults() -> None:
    run_state_machine_as_test(
        TransferMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
