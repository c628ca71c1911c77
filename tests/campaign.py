"""Long checks that the suite has no time for.

python -m tests.campaign answers    20 prompts of 1 to 6,000 tokens on PP∈{1,2,3}×TP∈{1,3} of SmolLM2-135M, and
                                    tiny Llama, Qwen2 and Qwen3 models on PP2·TP2, against single-process transformers
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests import answers, tiny_models
from tests.harness import model_folder
from tests.oracle import Oracle, prompts

PAGE_SIZE, CHUNK_TOKENS = 64, 512
LONGER = [2, 100, 200, 300, 400, 600, 777, 900, 1100, 1500, 2047, 6000]


def run_answers(layouts: list[tuple[int, int]]) -> int:
    """Returns the number of wrong answers."""
    model = model_folder()
    all_lengths = sorted([*answers.lengths(PAGE_SIZE, CHUNK_TOKENS), *LONGER])
    started = time.monotonic()
    case = answers.Case.of(Oracle(model), prompts(model, all_lengths))
    _say(f"oracle: {len(all_lengths)} prompts of {all_lengths} tokens in {time.monotonic() - started:.0f} s")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        with answers.site(Path(folder), model, layouts, chunk_tokens=CHUNK_TOKENS, page_size=PAGE_SIZE) as site:
            for pp, tp in layouts:
                with site.group(pp, tp):
                    wrong += _report(f"SmolLM2-135M PP{pp} TP{tp}", site, case)
        for name in tiny_models.CONFIGS:
            place = Path(folder) / name
            tiny = tiny_models.make(name, place / "model")
            tiny_case = answers.Case.of(Oracle(tiny), tiny_models.prompts([1, 15, 16, 17, 63, 64, 65, 128, 300, 1500]))
            with answers.site(place, tiny, [(2, 2)], chunk_tokens=64, page_size=16) as site, site.group(2, 2):
                wrong += _report(f"tiny {name} PP2 TP2", site, tiny_case)
    _say(f"{'FAILED' if wrong else 'passed'}: {wrong} wrong answers")
    return wrong


def _report(what: str, site: answers.Site, case: answers.Case) -> int:
    started = time.monotonic()
    wrong = site.wrong_answers(case)
    _say(f"{what}: {len(case.prompts) - len(wrong)}/{len(case.prompts)} right in {time.monotonic() - started:.0f} s")
    for line in wrong:
        _say(f"  {line}")
    return len(wrong)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a command's output


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("campaign", choices=["answers"])
    parser.add_argument("--layouts", help="for example 2x1,3x3 (PP x TP); default: all")
    arguments = parser.parse_args()
    layouts = answers.LAYOUTS
    if arguments.layouts:
        layouts = [(int(pp), int(tp)) for pp, tp in (part.split("x") for part in arguments.layouts.split(","))]
    return 1 if run_answers(layouts) else 0


if __name__ == "__main__":
    sys.exit(main())
