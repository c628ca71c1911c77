"""The cache through which `transformers` layers fill the KV pool."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from prefill_node.kv_pool import KvPool, PlacedChunk


class StepCache(Cache):
    """What `transformers` calls a cache, for one step: stores each layer's new keys and values in the pool.

    `update` gives the new keys and values back as they are; the attention function reads the prefix itself.
    """

    def __init__(self, pool: KvPool, chunks: list[PlacedChunk]) -> None:
        super().__init__(layers=[])
        self.pool = pool
        self.chunks = chunks

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Args:
        key_states, value_states: [1, H, T, K] and [1, H, T, V], the tokens of all chunks of the step.
        layer_idx: number of the layer in the whole model.
        """
        key_THK, value_THV = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        for chunk in self.chunks:
            tokens = slice(chunk.offset, chunk.offset + len(chunk.tokens))
            self.pool.write(layer_idx, chunk, key_THK[tokens], value_THV[tokens])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nobody needs this."""
        return 0
