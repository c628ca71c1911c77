"""The first token.

A draw depends only on the logits, the parameters and the token's position, never on how the model is laid
out or what else is in the step. `headwater.draws.uniform` gives the same number on the decode side.
"""

from __future__ import annotations

import torch

from headwater.draws import uniform
from headwater.v1 import common_pb2


def sample(logits: torch.Tensor, sampling: common_pb2.SamplingParams, position: int) -> int:
    """Chooses a token.

    Args:
        logits: [vocab].
        position: of the chosen token in the sequence (prompt and answer).

    Returns:
        The most likely token for temperature 0, else a draw from the smallest set of tokens whose probability
        reaches top_p (nucleus sampling, Holtzman et al. 2020).
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = torch.softmax(logits.double() / sampling.temperature, dim=-1).sort(descending=True)
    cumulative = probabilities.cumsum(dim=-1)
    kept = cumulative
    if 0 < sampling.top_p < 1:
        count = int((cumulative < sampling.top_p).sum()) + 1
        kept = cumulative[:count]
    drawn = int((kept < uniform(sampling.seed, position) * kept[-1]).sum())
    return int(tokens[min(drawn, len(kept) - 1)])
