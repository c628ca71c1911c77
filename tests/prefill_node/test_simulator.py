"""The simulator: what it must agree with, and that policies and scheduling do what they promise."""

from __future__ import annotations

import random

import pytest

from prefill_node.chunking.policies import make_policy
from prefill_node.costs import GroupCost, StageCost
from prefill_node.scheduler import Limits, Scheduler
from prefill_node.simulator import Arrival, Hardware, Result, simulate

STAGE = StageCost(0.02, 1e-8, 2e-5, 1.5e-10)
PAGE = 64


def run(
    arrivals: list[Arrival],
    *,
    stages: int = 8,
    policy: str = "fixed",
    chunk_tokens: int = 4096,
    num_pages: int = 40_000,
    check: bool = False,
    **hardware: float,
) -> Result:
    cost = GroupCost((STAGE.scaled(1 / stages),) * stages)
    cuts = make_policy(policy, lambda: cost, chunk_tokens=chunk_tokens, page_size=PAGE, smoothing=0.75)  # type: ignore[arg-type]

    def balanced(scheduler: Scheduler) -> None:
        scheduler.pool.check()

    return simulate(
        arrivals,
        Hardware(cost, **hardware),
        cuts=cuts,
        limits=Limits(chunk_tokens, look_ahead=1, max_running=16, max_queued=1000, max_wait_seconds=10.0),
        num_pages=num_pages,
        page_size=PAGE,
        check=balanced if check else None,
    )


@pytest.mark.parametrize("policy", ["fixed", "dynamic", "optimal"])
def test_one_request_alone_takes_the_makespan_of_its_chunks(policy: str) -> None:
    cost = GroupCost((STAGE.scaled(1 / 8),) * 8)
    cuts = make_policy(policy, lambda: cost, chunk_tokens=8192, page_size=PAGE, smoothing=0.75)  # type: ignore[arg-type]
    result = run([Arrival("r", 1.0, 131_072)], policy=policy, chunk_tokens=8192)
    (outcome,) = result.outcomes
    assert outcome.ttft == pytest.approx(cost.makespan(0, cuts(0, 131_072, 1)), rel=1e-9)
    assert outcome.num_chunks == len(cuts(0, 131_072, 1))


def test_hops_and_transfers_take_their_time() -> None:
    plain = run([Arrival("r", 0.0, 131_072)]).outcomes[0]
    hops = run([Arrival("r", 0.0, 131_072)], hop_seconds=0.01).outcomes[0]
    assert hops.ttft == pytest.approx(plain.ttft + 7 * 0.01)
    slow = run([Arrival("r", 0.0, 131_072)], kv_bytes_per_token=1e5, kv_bytes_per_second=1e9).outcomes[0]
    # The links are busy from the first chunk on: each has an eighth of the bytes.
    assert slow.ttft == pytest.approx(plain.ttft)
    assert slow.delivered_at is not None
    assert slow.delivered_at > 131_072 * 1e5 / 8 / 1e9 > plain.ttft


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("num_tokens", [8192, 131_072])
def test_optimal_is_never_later_than_fixed_or_dynamic(stages: int, num_tokens: int) -> None:
    ttft = {
        (policy, size): run([Arrival("r", 0.0, num_tokens)], stages=stages, policy=policy, chunk_tokens=size)
        .outcomes[0]
        .ttft
        for policy in ("fixed", "dynamic", "optimal")
        for size in (2048, 6144, 12_288, 18_432)
    }
    best = min(seconds for (policy, _), seconds in ttft.items() if policy == "optimal")
    assert best <= min(ttft.values())
    for size in (2048, 6144, 12_288, 18_432):
        assert ttft["optimal", size] <= min(ttft["fixed", size], ttft["dynamic", size]) * (1 + 1e-9)


def test_s12_beside_a_million_tokens_a_thousand_begin_within_two_chunks() -> None:
    """S12: one long prompt owns every chunk; short prompts' TTFT explodes."""
    alone = run([Arrival("short", 0.0, 1024)]).outcomes[0].ttft
    for at in (0.5, 3.0, 9.99):
        result = run([Arrival("long", 0.0, 1_000_000), Arrival("short", at, 1024)])
        short = result.outcomes[1]
        largest = max(bar.end - bar.start for bar in result.bars if bar.track == "stage 0" and bar.request_id == "long")
        # On each stage it may find one chunk under way, but those of further stages pass while it is on its way.
        assert short.ttft <= alone + 2 * largest + 7 * largest
        started = min(bar.start for bar in result.bars if bar.request_id == "short")
        assert started - at <= 2 * largest


def test_abort_storm_of_500_at_eight_stages_leaves_nothing() -> None:
    """S10, S11: half of them are cancelled at random moments."""
    draw = random.Random(7)
    arrivals = []
    for number in range(500):
        at = draw.uniform(0, 20)
        cancel_at = at + draw.uniform(0, 3) if number % 2 else None
        arrivals.append(Arrival(f"r{number}", at, draw.choice([100, 1000, 5000, 30_000]), 0, cancel_at))
    result = run(arrivals, check=True, num_pages=600, chunk_tokens=2048)
    for outcome in result.outcomes:
        if outcome.arrival.cancel_at is None:
            assert outcome.delivered_at is not None
    cancelled = [outcome for outcome in result.outcomes if outcome.arrival.cancel_at is not None]
    assert any(outcome.first_token_at is None for outcome in cancelled)
    # A cancelled request is not begun by a stage that did not have the chunk yet.
    for outcome in cancelled:
        assert outcome.arrival.cancel_at is not None
        if outcome.first_token_at is None:
            late = [
                bar
                for bar in result.bars
                if bar.request_id == outcome.arrival.request_id and bar.start > outcome.arrival.cancel_at
            ]
            for stage in range(8):
                assert sum(bar.track == f"stage {stage}" for bar in late) <= 2


def test_the_bubble_of_one_request_is_the_textbook_one_where_chunks_take_the_same() -> None:
    # A cost without a prefix: (P - 1) / (P - 1 + M).
    cost = GroupCost((StageCost(0.0, 0.0, 1e-5, 0.0),) * 4)
    cuts = make_policy("fixed", lambda: cost, chunk_tokens=1024, page_size=PAGE, smoothing=0.0)
    result = simulate(
        [Arrival("r", 0.0, 9 * 1024)],
        Hardware(cost),
        cuts=cuts,
        limits=Limits(1024, 1, 4, 4, 10.0),
        num_pages=1000,
        page_size=PAGE,
    )
    assert result.bubble_share == pytest.approx(3 / (3 + 9))
