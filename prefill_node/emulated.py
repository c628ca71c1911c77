"""A stage that waits instead of computing, so that groups of any size run on any machine.

It takes as long as a cost says and fills the KV pool with numbers that depend on layer and position only; the hidden
states and the sampled tokens mean nothing. What surrounds it is what surrounds a real stage.
"""

from __future__ import annotations

import time

import torch

from kv_transfer.geometry import Span
from prefill_node.costs import StageCost
from prefill_node.kv_pool import KvPool, PlacedChunk

# Of the hidden states between stages: enough to be sent, and little to send.
_HIDDEN_SIZE = 4


class EmulatedStage:
    """Stands for `stage.Stage`.

    Args:
        layers: of this stage.
        last: whether it gives logits.
        cost: seconds of a step.
    """

    hidden_size = _HIDDEN_SIZE
    num_parameters = 0
    parameter_bytes = 0

    def __init__(self, layers: Span, *, last: bool, vocab_size: int, dtype: torch.dtype, cost: StageCost) -> None:
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._layers = layers
        self._last = last
        self._vocab_size = vocab_size
        self._cost = cost

    def forward(
        self,
        source: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        chunks: list[PlacedChunk],
        logits_of: list[int],
    ) -> torch.Tensor:
        """As `Stage.forward`, after as long as a step of `chunks` takes."""
        done_at = time.perf_counter() + self._cost.step_seconds(
            [(chunk.tokens.start, len(chunk.tokens)) for chunk in chunks]
        )
        for layer in range(self._layers.start, self._layers.end):
            for chunk in chunks:
                pool.fill(layer, chunk, value=float(layer + 1))
        time.sleep(max(0.0, done_at - time.perf_counter()))
        if not (self._last and logits_of):
            return self.empty(len(positions))
        logits = torch.zeros(len(logits_of), self._vocab_size)
        logits[:, 0] = 1.0
        return logits

    def empty(self, num_tokens: int) -> torch.Tensor:
        """As `Stage.empty`."""
        return torch.zeros(num_tokens, self.hidden_size, dtype=self.dtype)
