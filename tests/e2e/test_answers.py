"""Right answers and right KV, on every layout: the part of `python -m tests.campaign answers` that fits the suite."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import answers, tiny_models
from tests.e2e.landing import landed_kv
from tests.harness import model_folder
from tests.oracle import Oracle, prompts

PAGE_SIZE, CHUNK_TOKENS = 16, 64
# Of the keys and values, in float32.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(model_folder())


@pytest.fixture(scope="module")
def case(oracle: Oracle) -> answers.Case:
    return answers.Case.of(oracle, prompts(model_folder(), [*answers.lengths(PAGE_SIZE, CHUNK_TOKENS), 700]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[answers.Site]:
    folder = tmp_path_factory.mktemp("answers")
    layouts = answers.LAYOUTS
    with answers.site(folder, model_folder(), layouts, chunk_tokens=CHUNK_TOKENS, page_size=PAGE_SIZE) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("pp", "tp"), answers.LAYOUTS)
def test_smollm2_gives_the_oracles_tokens_and_kv(
    site: answers.Site, oracle: Oracle, case: answers.Case, pp: int, tp: int
) -> None:
    with site.group(pp, tp) as name:
        assert site.wrong_answers(case) == []
        prompt = case.prompts[-1][:200]
        landed = asyncio.run(landed_kv(site.cluster, name, prompt))
    assert landed.first_token == oracle.greedy(prompt, 1)[0]
    for (keys, values), (oracle_keys, oracle_values) in zip(landed.layers, oracle.kv(prompt), strict=True):
        assert (keys - oracle_keys).abs().max() <= TOLERANCE
        assert (values - oracle_values).abs().max() <= TOLERANCE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(tiny_models.CONFIGS))
def test_tiny_models_on_pp2_tp2_give_the_oracles_tokens(tmp_path: Path, name: str) -> None:
    model = tiny_models.make(name, tmp_path / "model")
    tiny_case = answers.Case.of(Oracle(model), tiny_models.prompts([*answers.lengths(PAGE_SIZE, CHUNK_TOKENS), 500]))
    place = answers.site(tmp_path, model, [(2, 2)], chunk_tokens=CHUNK_TOKENS, page_size=PAGE_SIZE)
    with place as running, running.group(2, 2):
        assert running.wrong_answers(tiny_case) == []
