"""Long checks that the suite has no time for.

python -m tests.campaign answers    20 prompts of 1 to 6,000 tokens on PP∈{1,2,3}×TP∈{1,3} of SmolLM2-135M, and
                                    tiny Llama, Qwen2 and Qwen3 models on PP2·TP2, against single-process transformers
python -m tests.campaign transfer   N random histories of transfers under faults (tests/kv_transfer/machine.py);
                                    they wait more than they compute, so --jobs may be twice the cores
python -m tests.campaign cluster    a cluster under load whose groups are killed, stopped, restarted and drained for
                                    --minutes (tests/chaos.py)
python -m tests.campaign rdma       all of tests/rdma over Soft-RoCE, in a virtual machine
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests import answers, chaos, tiny_models
from tests.harness import model_folder
from tests.kv_transfer.machine import TransferMachine
from tests.oracle import Oracle, prompts

PAGE_SIZE, CHUNK_TOKENS = 64, 512
# Histories of transfers between two lines of progress.
_PROGRESS = 250
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


def run_transfer(runs: int) -> int:
    """Returns 1 when a history went wrong; Hypothesis then prints the shortest one it found."""
    # Everything that goes wrong is meant to.
    logging.disable(logging.CRITICAL)
    started = time.monotonic()

    class Counted(TransferMachine):
        def teardown(self) -> None:
            super().teardown()
            if self.happened["runs"] % _PROGRESS == 0:
                _say(f"{self.happened['runs']} runs in {time.monotonic() - started:.0f} s")

    hypothesis = settings(
        max_examples=runs,
        stateful_step_count=40,
        deadline=None,
        # Half of what happens is up to the machine, so a shorter history would seldom fail again.
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(Counted, settings=hypothesis)
    except BaseException:
        _say(f"FAILED after {time.monotonic() - started:.0f} s; so far: {dict(TransferMachine.happened)}")
        raise
    _say(f"{dict(TransferMachine.happened)} in {time.monotonic() - started:.0f} s")
    _say(f"{TransferMachine.happened['runs']} runs, 0 wrong bytes, 0 leaks")
    return 0


def run_transfer_jobs(runs: int, jobs: int) -> int:
    """As `run_transfer`, shared by processes. Returns 1 when one of them failed."""
    command = [sys.executable, "-m", "tests.campaign", "transfer", "--runs"]
    shares = [runs // jobs + (number < runs % jobs) for number in range(jobs)]
    processes = [subprocess.Popen([*command, str(share)]) for share in shares]
    failed = [process.wait() for process in processes].count(0) < jobs
    _say("FAILED; the output above says what" if failed else f"{runs} runs, 0 wrong bytes, 0 leaks")
    return int(failed)


def run_cluster(minutes: float, seed: int) -> int:
    """Returns 1 when a request got wrong tokens, hung, or something leaked."""
    with tempfile.TemporaryDirectory() as folder:
        _say(f"seed {seed}")
        it = chaos.run(Path(folder), 60 * minutes, seed)
    for line in it.wrong:
        _say(f"  {line}")
    _say(f"{dict(it.happened)}")
    answered = it.happened["answered"]
    _say(f"{'FAILED' if it.wrong else 'passed'}: {answered} answers, {len(it.wrong)} wrong or hung, 0 leaks")
    return 1 if it.wrong else 0


def run_rdma() -> int:
    """Returns the script's exit status."""
    script = Path(__file__).parent / "rdma" / "run.sh"
    return subprocess.run(["bash", str(script), "full"], check=False).returncode


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
    parser.add_argument("campaign", choices=["answers", "transfer", "cluster", "rdma"])
    parser.add_argument("--layouts", help="of answers: for example 2x1,3x3 (PP x TP); default: all")
    parser.add_argument("--runs", type=int, default=10_000, help="of transfer")
    parser.add_argument("--minutes", type=float, default=10.0, help="of cluster")
    parser.add_argument("--seed", type=int, default=0, help="of cluster: which troubles come")
    parser.add_argument("--jobs", type=int, default=1, help="of transfer: processes that share the runs")
    arguments = parser.parse_args()
    if arguments.campaign == "transfer" and arguments.jobs > 1:
        return run_transfer_jobs(arguments.runs, arguments.jobs)
    if arguments.campaign == "transfer":
        return run_transfer(arguments.runs)
    if arguments.campaign == "cluster":
        return run_cluster(arguments.minutes, arguments.seed)
    if arguments.campaign == "rdma":
        return run_rdma()
    layouts = answers.LAYOUTS
    if arguments.layouts:
        layouts = [(int(pp), int(tp)) for pp, tp in (part.split("x") for part in arguments.layouts.split(","))]
    return 1 if run_answers(layouts) else 0


if __name__ == "__main__":
    sys.exit(main())
