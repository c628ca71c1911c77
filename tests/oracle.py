"""What stock `transformers` computes in one process: the answers that every layout must give."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from transformers import AutoModelForCausalLM


class Oracle:
    """A model folder in float32, single process, one thread."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The most likely continuation of exactly `max_tokens` tokens."""
        output = self._model.generate(
            torch.tensor([list(token_ids)]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(token_ids) :].tolist()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def kv(self, token_ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, [heads, tokens, size]."""
        cache = self._model(torch.tensor([list(token_ids)]), use_cache=True, logits_to_keep=1).cache
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@functools.cache
def corpus(folder: Path) -> list[int]:
    """Real text as tokens: Python's own argparse and inspect modules."""
    import argparse
    import inspect

    text = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (argparse, inspect))
    return list(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def prompts(folder: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths, each from another place of the corpus."""
    tokens = corpus(folder)
    starts = [(number * 1009) % (len(tokens) - max(lengths)) for number in range(len(lengths))]
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
