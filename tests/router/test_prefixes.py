"""What a router believes that its groups have of a prompt."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client import prompt_request
from headwater.tokens import pack
from router.prefixes import BLOCK_TOKENS, Prefixes, blocks_of
from router.snapshot import PrefillGroup
from tests.router.fakes import site
from tests.router.test_registry import Clock, Scripted, running


def tokens(num_blocks: int, beside: int = 0, seed: int = 0) -> bytes:
    draw = random.Random(seed)
    return pack(draw.randrange(50_000) for _ in range(num_blocks * BLOCK_TOKENS + beside))


def test_blocks_are_those_of_the_prompt_without_its_last_token() -> None:
    assert [len(blocks_of(tokens(2, beside))) for beside in (-1, 0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS)] == [
        1,
        1,
        2,
        2,
        2,
    ]
    assert blocks_of(b"") == blocks_of(pack([1])) == ()


def test_a_block_stands_for_everything_up_to_its_end() -> None:
    one = blocks_of(tokens(4, 1))
    assert blocks_of(tokens(9, 1))[:4] == one
    changed = bytearray(tokens(4, 1))
    changed[BLOCK_TOKENS * 4] ^= 1
    other = blocks_of(bytes(changed))
    assert other[0] == one[0]
    assert not set(other[1:]) & set(one)


@given(
    sent=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=20),
    asked=st.tuples(st.integers(0, 2), st.integers(0, 6)),
    capacity=st.integers(0, 8),
)
def test_beginnings_that_were_sent_lately_are_known_and_the_oldest_are_forgotten(
    sent: list[tuple[int, int]], asked: tuple[int, int], capacity: int
) -> None:
    def chain(prompt: tuple[int, int]) -> list[int]:
        """Prompts of three kinds, of which the second and the third begin alike."""
        kind, length = prompt
        return [hash((max(kind, 1) if place < 2 else kind, place)) for place in range(length)]

    prefixes = Prefixes()
    latest: list[int] = []
    for prompt in sent:
        blocks = chain(prompt)
        prefixes.add(blocks, capacity * BLOCK_TOKENS + BLOCK_TOKENS // 2)
        latest = ([block for block in latest if block not in blocks] + blocks[::-1])[-capacity:] if capacity else []
    known = 0
    for block in chain(asked):
        if block not in latest:
            break
        known += 1
    assert prefixes.cached_tokens(chain(asked)) == known * BLOCK_TOKENS


def test_the_registry_counts_what_was_sent_until_the_group_is_a_new_one() -> None:
    async def run() -> None:
        group, clock = Scripted(), Clock()

        def says(epoch: str) -> None:
            group.says(epoch)
            assert group.answer is not None
            group.answer.capacity_tokens = 10 * BLOCK_TOKENS
            group.answer.prefix_cache.SetInParent()

        says("a")
        async with running(group, clock) as (registry, changes):
            await changes.get()

            def seen(blocks: tuple[int, ...]) -> PrefillGroup:
                return registry.snapshot(blocks).prefill[0]

            one = blocks_of(tokens(3, 10))
            longer = blocks_of(tokens(5, 10))
            with registry.dispatched("p0", 3 * BLOCK_TOKENS + 10, one):
                assert seen(longer).cached_tokens == 3 * BLOCK_TOKENS
                # What is cached is no work of the group's.
                with registry.dispatched("p0", 5 * BLOCK_TOKENS + 10, longer):
                    assert seen(()).sent == (3 * BLOCK_TOKENS + 10, 2 * BLOCK_TOKENS + 10)
            assert (seen(longer).cached_tokens, seen(()).cached_tokens) == (5 * BLOCK_TOKENS, 0)
            assert seen(blocks_of(tokens(5, 10, seed=1))).cached_tokens == 0
            says("b")
            registry.refresh("p0")
            await changes.get()
            assert seen(longer).cached_tokens == 0
            # A group that keeps none.
            group.says("c")
            registry.refresh("p0")
            await changes.get()
            with registry.dispatched("p0", 3 * BLOCK_TOKENS + 10, one):
                assert seen(one).cached_tokens == 0

    asyncio.run(run())


@pytest.mark.parametrize(("same", "most"), [(20, 4), (7, 2)])
def test_prompts_that_begin_alike_go_to_the_same_group(monkeypatch: pytest.MonkeyPatch, same: int, most: int) -> None:
    monkeypatch.setattr("router.prefixes.BLOCK_TOKENS", 8)

    async def run() -> None:
        async with site([7], 2, 'prefill_policy = "prefix_affinity"') as it:
            for number in range(4):
                await it.answer(prompt_request([*range(1, 1 + same), *[100 + number] * 20], 1))
            # Others take turns.
            assert max(len(group.requests) for group in it.prefill) == most

    asyncio.run(run())
