"""KV of several requests at different lengths, for stock `transformers` models that decode one token each, or compute
one request's prompt.

Each request has memory of its own, exactly as long as it was promised; nothing is padded and nothing is
masked. The model's layers run on the whole batch, and attention runs request by request.

Suffixes: B requests, N query heads, H key/value heads, G = N / H, C capacity in tokens, L tokens so far, T new tokens,
K key size, V value size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import AttentionInterface, Cache

from headwater.v1 import common_pb2
from kv_transfer.geometry import Box, CellSize, PagedLayout, Span
from kv_transfer.incoming import PagedDestination
from kv_transfer.memory import HostBuffer

NAME = "headwater_ragged"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RequestKv:
    """One request's KV for all layers; also the `DirectDestination` of its transfer.

    Args:
        capacity: tokens, prompt and answer.
    """

    def __init__(self, geometry: common_pb2.Geometry, capacity: int) -> None:
        layers, heads = Span(0, geometry.num_layers), Span(0, geometry.num_kv_heads)
        # One page that holds the whole request.
        self.layout = PagedLayout(layers, heads, capacity, 1, CellSize.of(geometry))
        self.pages = [0]
        self._buffer = HostBuffer(self.layout.total_bytes)
        self.address = self._buffer.address
        self._paged = PagedDestination(self.layout, self.pages, self.address)
        # The tensors keep the memory alive, whoever holds them.
        flat = torch.frombuffer(self._buffer.view(), dtype=DTYPES[geometry.dtype])
        shapes = [(capacity, len(heads), geometry.key_size), (capacity, len(heads), geometry.value_size)]
        views = flat.split([torch.Size(shape).numel() for shape in shapes] * geometry.num_layers)
        self.keys_CHK = [view.view(shapes[0]) for view in views[::2]]
        self.values_CHV = [view.view(shapes[1]) for view in views[1::2]]

    def unpack(self, box: Box, address: int) -> None:
        """See `kv_transfer.incoming.Destination`."""
        self._paged.unpack(box, address)

    def digest(self, box: Box) -> bytes:
        """See `kv_transfer.incoming.Destination`."""
        return self._paged.digest(box)

    def pack(self, box: Box, address: int) -> None:
        """See `kv_transfer.incoming.Destination`."""
        self._paged.pack(box, address)

    def retire(self) -> None:
        """See `kv_transfer.incoming.DirectDestination`. The memory itself is given back by `close`."""
        self._buffer.retire()

    def close(self) -> None:
        """Nobody reads the KV any more."""
        self._buffer.give_back_memory()


@dataclasses.dataclass(frozen=True)
class Row:
    """One request in a batch: its KV, and how many tokens it has before this step's."""

    kv: RequestKv
    length: int


class RaggedCache(Cache):
    """What `transformers` calls a cache, for one step of a batch."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(layers=[])
        self.rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Args:
        key_states, value_states: [B, H, T, K] and [B, H, T, V], the new tokens of each request.
        """
        num_new = key_states.shape[2]
        for index, row in enumerate(self.rows):
            new = slice(row.length, row.length + num_new)
            row.kv.keys_CHK[layer_idx][new] = key_states[index].transpose(0, 1)
            row.kv.values_CHV[layer_idx][new] = value_states[index].transpose(0, 1)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nobody needs this."""
        return 0


def register() -> None:
    """Makes the attention function known to `transformers` as attn_implementation=NAME."""
    AttentionInterface.register(NAME, ragged_attention)


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    ragged: RaggedCache,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Each request's one query over its own keys, or all queries of one prompt over its keys.

    Args:
        query: [B, N, 1, K], or [1, N, T, K] for a prompt from its first token on. ragged: passed through the model's
            forward.

    Returns:
        [B, T, N, V] and no weights.
    """
    if query.shape[2] > 1:
        output_NTV = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output_NTV.transpose(1, 2), None
    layer: int = module.layer_idx  # type: ignore[assignment] # every attention layer of transformers has it
    outputs = []
    for index, row in enumerate(ragged.rows):
        key_LHK = row.kv.keys_CHK[layer][: row.length + 1]
        value_LHV = row.kv.values_CHV[layer][: row.length + 1]
        # The group's query heads take the place of query tokens: all of them see all keys.
        query_HGK = query[index, :, 0].unflatten(0, (key_LHK.shape[1], -1))
        output_HGV = torch.nn.functional.scaled_dot_product_attention(
            query_HGK.unsqueeze(0),
            key_LHK.transpose(0, 1).unsqueeze(0),
            value_LHV.transpose(0, 1).unsqueeze(0),
            scale=scaling,
        )[0]
        outputs.append(output_HGV.flatten(0, 1))
    return torch.stack(outputs).unsqueeze(1), None
