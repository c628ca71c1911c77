"""Costs of published set-ups, for simulations and emulated groups: what a step takes on hardware that is not here.

Source: the SGLang team's "Pipeline Parallelism in SGLang: Scaling to Million-Token Contexts and Beyond" (lmsys.org, 15
January 2026), on H20. `python -m benchmarks.fit_profiles` makes these numbers from its figures. A step of x tokens
after a prefix of L takes, on a stage of n of N layers,

    step + n/N · (γ·L + β·x + α·(2·L·x + x²))

What a step costs per layer (`layers.base`) is 0: the figures cannot tell it from the rest.

*Qwen3*: step, β and α are fitted, to 7 figures. γ is 0: attention reads the prefix while it computes, and computing is
what takes the time. *DeepSeek*: γ, β and α are fitted, to 5 figures. Each chunk rebuilds the prefix's keys and values
from the latent, which is γ; step is Qwen3's, of the same software, because the figures cannot tell it from γ.

Assumed, because it is not published:
- Requests run in order, and as many steps are in flight as there are stages, the default of the published loop. With
  twice as many, as in our scheduler, the ratios would come out up to a third too high.
- A throughput is that of 16 requests that are all there at once, filling and draining included.
- At PP1 chunks are fixed, of the (first) size of the pipeline it is compared with. DeepSeek's ratios have one base,
  though: PP1 with the 12K that was best for tensor parallelism. It ran on the H20 of 141 GB, whose memory is faster.
- 128K is 2^17 tokens, and 1M is 2^20, not 10^6: from 512K to 1M the TTFT grew 3.68-fold, and quadratic growth to 10^6
  would be 3.64-fold.
- Chunks beyond 128K are as at 128K. The post recommends larger ones there.
- From stage to stage takes no time, and dynamic chunks are cut as ours, which merge a small tail.

Residuals (fitted / published - 1) stand with each profile: at most 2.6 % for Qwen3, 0.8 % for DeepSeek. Qwen3's figures
cannot be had together any closer with these parameters; with γ free as well the largest would be 1.8 %.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from headwater.errors import InvalidConfig
from kv_transfer.model_folder import layer_boundaries
from prefill_node.costs import GroupCost, StageCost


@dataclasses.dataclass(frozen=True)
class Profile:
    """A model on its hardware.

    Attributes:
        name: hardware, model and tensor-parallel size.
        source: of the figures.
        tp: ranks of a stage.
        kv_bytes_per_token: of all layers together.
        step_seconds: of any step on any stage, however few layers it has.
        layers: what all layers together take beyond that; a stage takes its layers' share.
        residuals: fitted / published - 1 of each published figure.
    """

    name: str
    source: str
    tp: int
    num_layers: int
    kv_bytes_per_token: int
    step_seconds: float
    layers: StageCost
    residuals: Mapping[str, float]

    def cost(self, pp: int) -> GroupCost:
        """Of each of `pp` stages, with layers split as a group splits them.

        Raises:
            InvalidConfig: there are more stages than layers.
        """
        boundaries = layer_boundaries(self.num_layers, pp, None)
        shares = [self.layers.scaled((end - first) / self.num_layers) for first, end in itertools.pairwise(boundaries)]
        return GroupCost(tuple(dataclasses.replace(share, base=self.step_seconds + share.base) for share in shares))


def profile_named(name: str) -> Profile:
    """Raises InvalidConfig when there is none of that name."""
    profile = PROFILES.get(name)
    if profile is None:
        raise InvalidConfig(f"profile {name!r} is unknown; choose one of {', '.join(PROFILES)}.")
    return profile


_SOURCE = "https://www.lmsys.org/blog/2026-01-15-chunked-pipeline"

PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="h20-qwen3-235b-a22b-fp8-tp4",
            source=_SOURCE,
            tp=4,
            num_layers=94,
            # 4 KV heads, keys and values of 128 bfloat16.
            kv_bytes_per_token=94 * 4 * (128 + 128) * 2,
            step_seconds=1.415e-2,
            layers=StageCost(base=0.0, per_prefix_token=0.0, per_token=5.568e-5, per_pair=2.777e-9),
            residuals={
                "TTFT 128K, PP1": -0.0069,
                "TTFT 128K, PP8, dynamic 18K": 0.0180,
                "TTFT 256K, PP8, dynamic 18K": 0.0062,
                "TTFT 512K, PP8, dynamic 18K": -0.0187,
                "TTFT 1M, PP8, dynamic 18K": -0.0066,
                "throughput PP8 / PP1, dynamic 18K": 0.0254,
                "throughput PP8 / PP1, fixed 6K": -0.0107,
            },
        ),
        Profile(
            name="h20-deepseek-v3.1-tp8",
            source=_SOURCE,
            tp=8,
            num_layers=61,
            # A latent of 512 and a rotated key of 64, bfloat16, on every rank alike.
            kv_bytes_per_token=61 * (512 + 64) * 2,
            step_seconds=1.415e-2,
            layers=StageCost(base=0.0, per_prefix_token=2.932e-6, per_token=8.417e-5, per_pair=2.045e-9),
            residuals={
                "TTFT 128K, PP1": -0.0041,
                "TTFT 128K, PP4, dynamic 12K": 0.0035,
                "throughput PP4 / PP1, dynamic 12K": 0.0073,
                "throughput PP4 / PP1, fixed 4K": -0.0020,
                "throughput PP4 / PP1, fixed 12K": -0.0056,
            },
        ),
    )
}
