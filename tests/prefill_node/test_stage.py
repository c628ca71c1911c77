"""Stages hold their own part of the model and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headwater.errors import UnsupportedModel
from headwater.v1 import common_pb2
from kv_transfer.geometry import Span
from kv_transfer.model_folder import read_model_folder
from prefill_node import stage as stage_module
from prefill_node.kv_pool import KvPool, PlacedChunk
from prefill_node.sampling import sample
from prefill_node.stage import Stage
from tests import tiny_models


def build(model: Path, first: int, end: int) -> Stage:
    cpu = torch.device("cpu")
    return Stage(model, layers=Span(first, end), num_layers=5, dtype=torch.float32, device=cpu, tensor_mesh=None)


@pytest.mark.parametrize("name", list(tiny_models.CONFIGS))
def test_stages_hold_the_model_once_but_for_the_tied_embedding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.make(name, tmp_path / "model")
    read: list[str] = []
    original = stage_module._Checkpoint.read

    def recorded(self: stage_module._Checkpoint, tensor: str, part: tuple[slice, ...]) -> torch.Tensor:
        read.append(tensor)
        return original(self, tensor, part)

    monkeypatch.setattr(stage_module._Checkpoint, "read", recorded)
    total = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    tied = tiny_models.CONFIGS[name].tie_word_embeddings
    assert build(model, 0, 5).num_parameters == total
    read.clear()
    stages = [build(model, 0, 2), build(model, 2, 3), build(model, 3, 5)]
    replicated = 512 * 64 if tied else 0
    assert sum(stage.num_parameters for stage in stages) == total + replicated
    assert read_model_folder(model).num_parameters == total
    # Each tensor was read by its own stage only; the tied embedding by the first and the last.
    assert sorted(read) == sorted([*set(read), *(["model.embed_tokens.weight"] if tied else [])])
    read.clear()
    build(model, 2, 3)
    assert all(tensor.startswith("model.layers.2.") for tensor in read)
    assert read


def test_stages_in_a_row_compute_what_the_whole_model_computes(tmp_path: Path) -> None:
    model = tiny_models.make("qwen3", tmp_path / "model")
    geometry = common_pb2.Geometry(key_size=32, value_size=32, dtype="float32", page_size=8)
    tokens = torch.arange(2, 25)
    expected = AutoModelForCausalLM.from_pretrained(model)(tokens[None]).logits[0, -1]
    hidden: torch.Tensor = tokens
    for first, end in ((0, 2), (2, 5)):
        stage = build(model, first, end)
        pool = KvPool(geometry, Span(first, end), Span(0, 2), 4, torch.device("cpu"))
        chunk = PlacedChunk("r", Span(0, 23), 0, [], [(0, 23)])
        hidden = stage.forward(hidden, torch.arange(23), pool, [chunk], [22])
    assert (hidden[0] - expected).abs().max() <= 1e-4


def test_a_model_whose_weights_must_be_converted_is_refused(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model")
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.fused"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"no tensor 'model.layers.1.mlp.up_proj.weight'"):
        build(model, 0, 5)


def test_sampling_is_greedy_at_zero_and_follows_the_seed_otherwise() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))
    assert sample(logits, common_pb2.SamplingParams(), 3) == 1
    drawn = [sample(logits, common_pb2.SamplingParams(temperature=1, top_p=1, seed=s), 3) for s in range(400)]
    assert drawn == [sample(logits, common_pb2.SamplingParams(temperature=1, top_p=1, seed=s), 3) for s in range(400)]
    counts = [drawn.count(token) for token in range(4)]
    assert 160 <= counts[1] <= 240
    assert 80 <= counts[2] <= 160
    # The two likeliest tokens reach 0.8: nothing else is drawn.
    nucleus = {sample(logits, common_pb2.SamplingParams(temperature=1, top_p=0.75, seed=s), 3) for s in range(200)}
    assert nucleus == {1, 2}


def test_prefill_and_decode_draw_the_same_token() -> None:
    from kv_transfer.connectors.decoder import choose

    generator = torch.Generator().manual_seed(3)
    for seed in range(50):
        logits = torch.randn(100, generator=generator)
        for top_p in (1.0, 0.9, 0.3):
            params = common_pb2.SamplingParams(temperature=0.8, top_p=top_p, seed=seed)
            assert sample(logits, params, seed) == choose(logits, params, seed)
