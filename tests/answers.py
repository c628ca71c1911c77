"""Right answers: every layout against the oracle. Shared by the suite (a part) and the campaign (all)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwater.cluster import Cluster
from tests.harness import Group, ask_all, assert_balanced, processes, until_paired, write_cluster
from tests.oracle import Oracle

NUM_TOKENS = 32

LAYOUTS = [(pp, tp) for tp in (1, 3) for pp in (1, 2, 3)]
# What the suite has time for; the campaign runs all.
SUITE_LAYOUTS = [(1, 1), (3, 1), (1, 3), (3, 3)]


@dataclasses.dataclass(frozen=True)
class Case:
    """Prompts with the oracle's answers."""

    prompts: list[list[int]]
    expected: list[list[int]]

    def part(self, first: int, step: int) -> Case:
        """Every `step`-th prompt."""
        return Case(self.prompts[first::step], self.expected[first::step])

    @staticmethod
    def of(oracle: Oracle, prompts: list[list[int]]) -> Case:
        return Case(prompts, [oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts])


@dataclasses.dataclass(frozen=True)
class Site:
    """One router and one decode node, with a prefill group for each layout that is started when its turn comes."""

    cluster: Cluster
    path: Path
    log_dir: Path

    @contextlib.contextmanager
    def group(self, pp: int, tp: int) -> Iterator[str]:
        """Runs the group of a layout; the router finds it by itself. Gives its name."""
        name = group_name(pp, tp)
        with processes(self.cluster, self.path, [name], self.log_dir):
            asyncio.run(until_paired(self.cluster.router.address, name))
            try:
                yield name
            finally:
                asyncio.run(assert_balanced(self.cluster, [name]))

    def wrong_answers(self, case: Case) -> list[str]:
        """Sends all prompts at once. Returns a line for each answer that is not the oracle's."""
        answers = asyncio.run(ask_all(self.cluster.router.address, case.prompts, NUM_TOKENS))
        return [
            f"prompt of {len(prompt)} tokens: {answer.tokens} instead of {expected}"
            for prompt, expected, answer in zip(case.prompts, case.expected, answers, strict=True)
            if answer.tokens != expected
        ]


def group_name(pp: int, tp: int) -> str:
    return f"pp{pp}tp{tp}"


@contextlib.contextmanager
def site(
    folder: Path, model: Path, layouts: Sequence[tuple[int, int]], *, chunk_tokens: int, page_size: int
) -> Iterator[Site]:
    """Starts router and decode node in `folder`, for a model."""
    options = (("chunk_tokens", chunk_tokens), ("page_size", page_size))
    path = folder / "cluster.toml"
    cluster = write_cluster(path, model, [Group(group_name(pp, tp), pp, tp, options) for pp, tp in layouts])
    with processes(cluster, path, ["d0", "router"], folder):
        yield Site(cluster, path, folder)


def lengths(page_size: int, chunk_tokens: int) -> list[int]:
    """Where paging and chunking can be off by one."""
    return [
        1,
        page_size - 1,
        page_size,
        page_size + 1,
        chunk_tokens - 1,
        chunk_tokens,
        chunk_tokens + 1,
        2 * chunk_tokens,
    ]
