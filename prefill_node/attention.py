"""Attention of a step's chunks over their own tokens and over their prefix in the pool.

No mask over the prefix is ever built. A chunk's queries see all of the prefix, so that part needs no mask,
and the chunk itself by plain causality; the two parts are merged by their log-sum-exp, which is exact (the
online softmax of Milakov and Gimelshein 2018, as in FlashAttention's split over keys).

Grouped queries share a key/value head without copying it: over the prefix the group's heads are laid along the
query axis; inside the chunk the key/value head is a broadcast view.

Suffixes: 1 batch, N query heads of this rank, H key/value heads, G = N / H, T tokens of the step, X tokens of a
chunk, L tokens of its prefix, K key size, V value size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from headwater.errors import UnsupportedModel
from prefill_node.step_cache import StepCache

NAME = "headwater_chunked"

# Meaning that this function does not implement; a layer that passes one of these is refused by the warm-up.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


def register() -> None:
    """Makes the function known to `transformers` as attn_implementation=NAME. No mask function goes with it."""
    AttentionInterface.register(NAME, chunked_attention)


def chunked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    step_cache: StepCache,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for all chunks of a step.

    Args:
        query: [1, N, T, K]. key, value: [1, H, T, K] and [1, H, T, V], already in the pool.
        step_cache: passed through the model's forward; gives the chunks and their prefixes.

    Returns:
        [1, T, N, V] and no weights.

    Raises:
        UnsupportedModel: the layer wants something that this function does not compute.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} uses {name}, which chunked prefill does not compute yet; "
                "serve a model without it."
            )
    layer: int = module.layer_idx  # type: ignore[assignment] # every attention layer of transformers has it
    outputs = []
    for chunk in step_cache.chunks:
        tokens = slice(chunk.offset, chunk.offset + len(chunk.tokens))
        query_NXK = query[0, :, tokens]
        output, lse = _within(query_NXK, key[0, :, tokens], value[0, :, tokens], scaling)
        if chunk.tokens.start:
            key_LHK, value_LHV = step_cache.pool.prefix(layer, chunk)
            before, lse_before = _over_prefix(query_NXK, key_LHK, value_LHV, scaling)
            output = _merge(output, lse, before, lse_before)
        outputs.append(output)
    output_NTV = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return output_NTV.transpose(0, 1).unsqueeze(0), None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, heads, X, V] and log-sum-exp [B, heads, X] of flash attention."""
    if query.device.type == "cuda":
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(  # noqa: SLF001 - the one that returns it
            query, key, value, 0.0, causal, scale=scaling
        )
        return output, lse[..., : query.shape[2]]
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
        query, key, value, 0.0, causal, scale=scaling
    )
    return output, lse


def _within(
    query_NXK: torch.Tensor, key_HXK: torch.Tensor, value_HXV: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention inside the chunk: [N, X, V] and [N, X]."""
    num_heads, num_tokens, _ = query_NXK.shape
    group = num_heads // key_HXK.shape[0]
    query_HGXK = query_NXK.unflatten(0, (-1, group))
    key_HGXK = key_HXK.unsqueeze(1).expand(-1, group, -1, -1)
    value_HGXV = value_HXV.unsqueeze(1).expand(-1, group, -1, -1)
    output, lse = _flash(query_HGXK, key_HGXK, value_HGXV, scaling, causal=True)
    return output.reshape(num_heads, num_tokens, -1), lse.reshape(num_heads, num_tokens)


def _over_prefix(
    query_NXK: torch.Tensor, key_LHK: torch.Tensor, value_LHV: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the whole prefix: [N, X, V] and [N, X]."""
    num_heads, num_tokens, size = query_NXK.shape
    folded = query_NXK.reshape(1, key_LHK.shape[1], -1, size)
    key, value = (part.transpose(0, 1).unsqueeze(0) for part in (key_LHK, value_LHV))
    output, lse = _flash(folded, key, value, scaling, causal=False)
    return output.reshape(num_heads, num_tokens, -1), lse.reshape(num_heads, num_tokens)


def _merge(output_a: torch.Tensor, lse_a: torch.Tensor, output_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Softmax over the union of two disjoint sets of keys, from the softmax over each."""
    total = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((lse - total).exp().unsqueeze(-1) for lse in (lse_a, lse_b))
    return (output_a * weight_a + output_b * weight_b).to(output_a.dtype)
