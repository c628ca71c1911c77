"""Tiny random models of several architectures, made on the spot."""

from __future__ import annotations

import copy
from pathlib import Path

import tokenizers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Large enough that the most likely token is well ahead of the next.
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, head_dim=16),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32),
}


def make(name: str, folder: Path, **changes: int) -> Path:
    """Writes the model `name` with random weights, and a tokenizer, to `folder`.

    Args:
        changes: to the architecture's configuration.
    """
    torch.manual_seed(7)
    config = copy.deepcopy(CONFIGS[name])
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Biases start as zeros, which would hide a wrong shard.
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    vocabulary = {f"t{number}": number for number in range(512)}
    word_level = tokenizers.models.WordLevel(vocabulary, unk_token="t2")
    tokenizer = tokenizers.Tokenizer(word_level)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def prompts(lengths: list[int]) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(2, 512, (length,), generator=generator).tolist() for length in lengths]
