"""The pipeline: real stages against the ideal, emulated ones against what was published, a million tokens simulated.

    python -m benchmarks.pipeline [--only real|emulated|simulated|control ...] [--runs 5] [--json FILE]

real: SmolLM2-135M, one core a stage; PP1 and PP2 take turns. TTFT by the client; policy "optimal". The groups' own
    traces say what is lost where (`Loss`). With the first of --tokens two PP1 groups run side by side as well, which
    shows what two busy cores lose to each other without any pipeline.
emulated: see `benchmarks.emulated`.
simulated: 2²⁰ tokens at PP8·TP4 in the simulator, as published and with "optimal".
control: see `benchmarks.control`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import statistics
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from rich.console import Console

from benchmarks.control import measure_leader, measure_starts
from benchmarks.emulated import POLICIES, PROFILE, START_SECONDS, emulated, ttft
from benchmarks.report import print_figures, write_json
from headwater.cluster import load_cluster
from headwater.rpc import open_channel
from headwater.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_node.chunking.policies import make_policy
from prefill_node.profiles import PROFILES
from prefill_node.scheduler import Limits
from prefill_node.simulator import Arrival, Hardware, simulate
from router.supervisor import Supervisor
from tests.harness import free_ports, model_folder


async def trace(address: str, request_id: str) -> prefill_pb2.TracePrefillResponse:
    async with open_channel(address) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        return await stub.TracePrefill(prefill_pb2.TracePrefillRequest(request_id=request_id))


@dataclasses.dataclass(frozen=True)
class Loss:
    """Where the stages' time went in one request, from its trace.

    Attributes:
        busy: seconds of computing, of all stages together.
        idle: share of the stages' time without work, from the first start to the last end.
        ideal_idle: (P-1)/(P-1+M), for M equal chunks.
        hand_over: the part of `idle` in which a stage had nothing to do and its input had been computed: activations on
            their way, and control.
        around: share of the TTFT before the first start and after the last end.
    """

    busy: float
    idle: float
    ideal_idle: float
    hand_over: float
    around: float

    @classmethod
    def of(cls, response: prefill_pb2.TracePrefillResponse, ttft_seconds: float) -> Loss:
        stages = response.num_stages
        spans = {(span.stage, span.sequence): span for span in response.stages}
        steps = sorted({sequence for _, sequence in spans})
        whole = max(span.end for span in spans.values()) - min(span.start for span in spans.values())
        busy = sum(span.end - span.start for span in spans.values())
        late = 0.0
        for stage in range(stages):
            for before, step in itertools.pairwise([None, *steps]):
                ready = [spans[stage, before].end] if before is not None else []
                ready += [spans[stage - 1, step].end] if stage else []
                late += max(0.0, spans[stage, step].start - max(ready)) if ready else 0.0
        return cls(
            busy=busy,
            idle=1 - busy / (whole * stages),
            ideal_idle=(stages - 1) / (stages - 1 + len(steps)),
            hand_over=late / (whole * stages),
            around=1 - whole / ttft_seconds,
        )


# --- real


# pp and cores.
_GROUPS = {"pp1": (1, [0]), "pp1b": (1, [1]), "pp2": (2, [0, 1])}


def real_cluster(folder: Path, model: Path, num_tokens: int, names: Iterable[str]) -> Path:
    ports = free_ports(4)
    pool = -(-num_tokens // 64) * 64
    # Each run asks for the same prompt.
    common = f'chunk_policy = "optimal"\nchunk_tokens = 1024\npool_tokens = {pool}\nprefix_cache = false\n'
    groups = {name: _GROUPS[name] for name in names}
    path = folder / "cluster.toml"
    path.write_text(
        f'log_level = "warning"\n[model]\npath = "{model}"\nmax_context_tokens = {max(8192, 2 * num_tokens)}\n'
        f'[router]\naddress = "127.0.0.1:{ports[0]}"\n'
        + "".join(
            f'[[prefill]]\nname = "{name}"\naddress = "127.0.0.1:{port}"\npp = {pp}\ncores = {cores}\n{common}'
            for (name, (pp, cores)), port in zip(groups.items(), ports[1:], strict=False)
        ),
        encoding="utf-8",
    )
    return path


async def measure_real(
    addresses: dict[str, str], token_ids: list[int], runs: int, console: Console, *, side_by_side: bool
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"pp1": [], "pp2": [], "two_pp1": []}
    losses: dict[str, list[Loss]] = {"pp1": [], "pp2": []}
    for _ in range(runs):
        for name, found in losses.items():
            request_id = uuid.uuid4().hex
            seconds[name].append(await ttft(addresses[name], token_ids, request_id))
            found.append(Loss.of(await trace(addresses[name], request_id), seconds[name][-1]))
            console.print(f"{len(token_ids)} tokens, {name}: {seconds[name][-1]:.2f} s")
        if side_by_side:
            both = await asyncio.gather(*(ttft(addresses[name], token_ids) for name in ("pp1", "pp1b")))
            seconds["two_pp1"].append(max(both))
            console.print(f"{len(token_ids)} tokens, two pp1 at once: {seconds['two_pp1'][-1]:.2f} s")

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 4)

    numbers: dict[str, Any] = {
        "pp2_over_pp1": median(one / two for one, two in zip(seconds["pp1"], seconds["pp2"], strict=True)),
        "bubble": median(loss.idle for loss in losses["pp2"]),
        "bubble_ideal": median(loss.ideal_idle for loss in losses["pp2"]),
        "bubble_hand_over": median(loss.hand_over for loss in losses["pp2"]),
        "around": median(loss.around for loss in losses["pp2"]),
        # Computing the same takes longer on two stages than on one.
        "slower_cores": median(two.busy / one.busy for one, two in zip(losses["pp1"], losses["pp2"], strict=True)),
        "seconds": seconds,
    }
    if side_by_side:
        # What two busy cores lose to each other, with no pipeline between them.
        numbers["slower_side_by_side"] = median(
            two / one for one, two in zip(seconds["pp1"], seconds["two_pp1"], strict=True)
        )
    return numbers


def real(runs: int, sizes: list[int], console: Console) -> dict[str, Any]:
    model = model_folder()
    text = "".join(
        path.read_text(encoding="utf-8") for path in sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
    )
    ids = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    numbers: dict[str, Any] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            # Costs are measured by one group after the other: side by side they would measure each other.
            os.environ["XDG_CACHE_HOME"] = folder
            for name in _GROUPS:
                with Supervisor.of_cluster(real_cluster(Path(folder), model, size, [name]), Path(folder)) as alone:
                    alone.wait_ready(START_SECONDS)
            path = real_cluster(Path(folder), model, size, _GROUPS)
            cluster = load_cluster(path)
            with Supervisor.of_cluster(path, Path(folder)) as supervisor:
                supervisor.wait_ready(START_SECONDS)
                addresses = {group.name: group.address for group in cluster.prefill}
                found = asyncio.run(measure_real(addresses, ids[:size], runs, console, side_by_side=size == sizes[0]))
        numbers[f"pp2_over_pp1_{size // 1024}k"] = found.pop("pp2_over_pp1")
        numbers[f"real_{size // 1024}k"] = found
    return numbers


# --- simulated


def simulated() -> dict[str, Any]:
    cost = PROFILES[PROFILE].cost(8)
    numbers = {}
    # The published loop has one step a stage in flight.
    for key, policy, look_ahead in (("simulated_1m_s", "dynamic", 0), ("simulated_1m_optimal_s", "optimal", 1)):
        chunk_tokens, smoothing = POLICIES[policy]
        result = simulate(
            [Arrival("r", 0.0, 2**20)],
            Hardware(cost),
            cuts=make_policy(policy, lambda: cost, chunk_tokens=chunk_tokens, page_size=64, smoothing=smoothing),  # type: ignore[arg-type]
            limits=Limits(chunk_tokens, look_ahead, 1, 1, 1e9),
            num_pages=2**20 // 64,
            page_size=64,
        )
        numbers[key] = round(result.outcomes[0].ttft, 2)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=["real", "emulated", "simulated", "control"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 16_384], help="of real")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    console = Console()
    wanted = arguments.only or ["real", "emulated", "simulated", "control"]
    numbers: dict[str, Any] = {}
    if "simulated" in wanted:
        numbers |= simulated()
    if "control" in wanted:
        numbers |= measure_leader() | measure_starts(console)
    if "emulated" in wanted:
        numbers |= emulated(console)
    if "real" in wanted:
        numbers |= real(arguments.runs, arguments.tokens, console)
    bounds = {
        "pp2_over_pp1_8k": "≥ 1.75",
        "pp2_over_pp1_16k": "≥ 1.80",
        "emulated_efficiency_pp4": "≥ 0.90",
        "emulated_efficiency_pp8": "≥ 0.85",
        "simulated_1m_s": "420.91 ± 10 %",
        "control_p99_ms": "≤ 5",
        "leader_cpu_share_at_50_steps_per_s": "≤ 0.10",
    }
    print_figures("The pipeline", numbers, bounds)
    if arguments.json:
        write_json(arguments.json, numbers | {"runs": arguments.runs})


if __name__ == "__main__":
    main()
