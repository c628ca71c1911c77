"""Model folders, whole and damaged, made by hand: what is read from them and what is said about them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidConfig, ModelFolderError
from kv_transfer.model_folder import ModelFolder, check_parallel, layer_boundaries, read_model_folder, resolve_dtype

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "transformers_version": "5.24.0",
}
MLA = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    # As transformers saves it: the rotated part only.
    "head_dim": 64,
}
TENSORS = {"a.weight": ("F32", (4, 6)), "b.weight": ("BF16", (3000,))}
SHARDS = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
INDEX = "model.safetensors.index.json"


def safetensors(names: list[str], fill: int = 1) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = TENSORS[name]
        start, end = end, end + math.prod(shape) * {"F32": 4, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes([fill]) * end


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def change_config(folder: Path, **changes: object) -> None:
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | changes)


def drop_from_config(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config[name]
    write_json(folder / "config.json", config)


def shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_json(folder / INDEX, {"metadata": {}, "weight_map": SHARDS})
    for name, file in SHARDS.items():
        (folder / file).write_bytes(safetensors([name]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_json(path / "config.json", CONFIG)
    write_json(path / "tokenizer.json", {"version": "1.0"})
    (path / "model.safetensors").write_bytes(safetensors(list(TENSORS)))
    return path


def test_a_whole_folder(folder: Path) -> None:
    read = read_model_folder(folder)
    fingerprints = read.model_fingerprint, read.weights_fingerprint, read.tokenizer_fingerprint
    assert all(len(fingerprint) == 64 for fingerprint in fingerprints)
    assert len(set(fingerprints)) == 3
    assert read == ModelFolder(
        path=folder,
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=30,
        num_attention_heads=9,
        num_kv_heads=3,
        hidden_size=576,
        head_size=64,
        key_size=64,
        value_size=64,
        vocab_size=49152,
        max_context_tokens=8192,
        eos_token_ids=(2,),
        tie_word_embeddings=True,
        has_latent_kv=False,
        num_parameters=4 * 6 + 3000,
        model_fingerprint=fingerprints[0],
        weights_fingerprint=fingerprints[1],
        tokenizer_fingerprint=fingerprints[2],
    )


def test_absent_fields_have_their_defaults(folder: Path) -> None:
    for name in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "eos_token_id"):
        drop_from_config(folder, name)
    read = read_model_folder(folder)
    assert (read.head_size, read.num_kv_heads, read.eos_token_ids) == (64, 9, ())
    # No output embedding is stored.
    assert read.tie_word_embeddings


def test_names_of_older_architectures(folder: Path) -> None:
    aliases = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
    }
    write_json(folder / "config.json", {aliases.get(name, name): value for name, value in CONFIG.items()})
    read = read_model_folder(folder)
    assert (read.num_layers, read.num_attention_heads, read.hidden_size, read.max_context_tokens) == (30, 9, 576, 8192)


def test_the_language_model_of_a_multimodal_one(folder: Path) -> None:
    nested = {name: value for name, value in CONFIG.items() if name not in {"architectures", "eos_token_id"}}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    write_json(folder / "config.json", outer | {"text_config": nested})
    read = read_model_folder(folder)
    assert (read.architecture, read.model_type) == ("Gemma3ForConditionalGeneration", "llama")
    assert (read.num_layers, read.eos_token_ids) == (30, (1, 106))


def test_latent_kv_is_one_head_of_latent_and_rotated_key(folder: Path) -> None:
    change_config(folder, **MLA)
    read = read_model_folder(folder)
    assert read.has_latent_kv
    assert (read.num_kv_heads, read.key_size, read.value_size, read.head_size) == (1, 512, 64, 192)


@pytest.mark.parametrize(("generation", "expected"), [(7, (7,)), ([7, 9], (7, 9)), (None, (2,))])
def test_generation_config_decides_what_ends_an_answer(
    folder: Path, generation: object, expected: tuple[int, ...]
) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": generation})
    assert read_model_folder(folder).eos_token_ids == expected


def test_shards_have_the_fingerprint_of_the_single_file(folder: Path) -> None:
    single = read_model_folder(folder)
    shard(folder)
    assert read_model_folder(folder) == single


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"transformers_version": "4.40.0", "dtype": "bfloat16", "use_cache": True, "_name_or_path": "x"}, True),
        ({"rope_parameters": {"rope_theta": 1.0}}, False),
        ({"num_key_value_heads": 1}, False),
    ],
)
def test_model_fingerprint_changes_with_what_changes_results(
    folder: Path, change: dict[str, Any], *, same: bool
) -> None:
    before = read_model_folder(folder)
    change_config(folder, **change)
    assert (read_model_folder(folder).model_fingerprint == before.model_fingerprint) == same


def test_weights_fingerprint_changes_with_the_weights(folder: Path) -> None:
    before = read_model_folder(folder)
    (folder / "model.safetensors").write_bytes(safetensors(list(TENSORS), fill=2))
    after = read_model_folder(folder)
    assert after.weights_fingerprint != before.weights_fingerprint
    assert after.model_fingerprint == before.model_fingerprint


def test_tokenizer_fingerprint_changes_with_the_tokenizer(folder: Path) -> None:
    before = read_model_folder(folder)
    write_json(folder / "tokenizer.json", {"version": "2.0"})
    assert read_model_folder(folder).tokenizer_fingerprint != before.tokenizer_fingerprint


def _only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _lost_shard(folder: Path) -> None:
    shard(folder)
    (folder / SHARDS["b.weight"]).unlink()


def _cut_shard(folder: Path) -> None:
    shard(folder)
    file = folder / SHARDS["b.weight"]
    file.write_bytes(file.read_bytes()[:-1])


def _wrong_shard(folder: Path) -> None:
    shard(folder)
    (folder / SHARDS["b.weight"]).write_bytes(safetensors(["a.weight"]))


def _shard_elsewhere(folder: Path) -> None:
    shard(folder)
    write_json(folder / INDEX, {"weight_map": {"a.weight": "../secret.safetensors"}})


def _index_without_map(folder: Path) -> None:
    shard(folder)
    write_json(folder / INDEX, {"metadata": {}})


def _weights(content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)

    return damage


def _file(name: str, content: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(content)

    return damage


def _without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()

    return damage


def _config(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        change_config(folder, **changes)

    return damage


def _config_without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        drop_from_config(folder, name)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("config.json"), r"no config\.json.*it holds: model\.safetensors, tokenizer\.json"),
        (_file("config.json", "{"), r"config\.json is not valid JSON"),
        (_file("config.json", "[]"), r"config\.json does not hold a JSON object"),
        (_config_without("num_hidden_layers"), r"config\.json has no num_hidden_layers"),
        (_config_without("architectures"), r"config\.json has no architectures"),
        (_config_without("model_type"), r"config\.json has no model_type"),
        (_config(vocab_size="many"), r"config\.json: vocab_size is 'many'; it must be a positive whole number"),
        (_config(num_attention_heads=0), r"num_attention_heads is 0"),
        (_config(eos_token_id=["</s>"]), r"eos_token_id is \['</s>'\]"),
        (_file("generation_config.json", "{"), r"generation_config\.json is not valid JSON"),
        (_without("tokenizer.json"), r"no tokenizer\.json"),
        (_without("model.safetensors"), r"neither model\.safetensors nor model\.safetensors\.index\.json"),
        (_only_pickles, r"It has pytorch_model\.bin\. .*save_pretrained"),
        (_weights(b""), r"model\.safetensors is truncated: 0 of 8 bytes"),
        (_weights(b"version https://git-lfs.github.com/spec/v1\n"), r"Git LFS pointer.*git lfs pull"),
        (_weights(b"\xff" * 100), r"model\.safetensors is not a safetensors file"),
        (_weights((4).to_bytes(8, "little") + b"{{{{"), r"model\.safetensors is not a safetensors file"),
        (_weights((14).to_bytes(8, "little") + b'{"a.weight":1}'), r"model\.safetensors is not a safetensors file"),
        (_weights(safetensors(list(TENSORS))[:40]), r"model\.safetensors is truncated: 40 of \d+ bytes"),
        (_weights(safetensors(list(TENSORS))[:-1]), r"model\.safetensors is truncated: \d+ of \d+ bytes"),
        (_weights(safetensors(list(TENSORS)) + b"x"), r"model\.safetensors is damaged"),
        (_lost_shard, r"lacks model-00002-of-00002\.safetensors, one of the 2 shards"),
        (_cut_shard, r"model-00002-of-00002\.safetensors is truncated"),
        (_wrong_shard, r"model-00002-of-00002\.safetensors lacks the tensor b\.weight"),
        (_shard_elsewhere, r"names '\.\./secret\.safetensors', which is not a file of this folder"),
        (_index_without_map, r"index\.json is not a safetensors index"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelFolderError, match=message):
        read_model_folder(folder)


def test_an_unknown_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no model folder .*nowhere.*import-model"):
        read_model_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (30, 3), (2, 3)])
def test_possible_layouts(folder: Path, pp: int, tp: int) -> None:
    check_parallel(read_model_folder(folder), pp, tp)


@pytest.mark.parametrize(
    ("pp", "tp", "message"),
    [
        (31, 1, r"pp = 31: model has 30 layers.*Choose pp from 1 to 30"),
        (0, 1, r"pp = 0"),
        (1, 2, r"tp = 2 does not divide model's 9 attention heads and 3 key/value heads\. Choose tp from 1, 3\."),
        # Divides the attention heads only.
        (1, 9, r"tp = 9 does not divide"),
        (1, 0, r"tp = 0"),
    ],
)
def test_impossible_layouts(folder: Path, pp: int, tp: int, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        check_parallel(read_model_folder(folder), pp, tp)


def test_latent_kv_is_on_every_tensor_rank(folder: Path) -> None:
    change_config(folder, **MLA)
    read = read_model_folder(folder)
    check_parallel(read, 1, 16)
    with pytest.raises(InvalidConfig, match=r"128 attention heads\. Choose tp from 1, 2, 4, 8, 16, 32, 64\."):
        check_parallel(read, 1, 3)


def test_larger_shares_are_late() -> None:
    assert layer_boundaries(61, 4, None) == (0, 15, 30, 45, 61)
    assert layer_boundaries(30, 4, None) == (0, 7, 14, 22, 30)
    assert layer_boundaries(30, 1, None) == (0, 30)
    assert layer_boundaries(30, 3, (4, 20)) == (0, 4, 20, 30)


@given(st.integers(1, 200).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))))
def test_shares_are_even_and_never_shrink(case: tuple[int, int]) -> None:
    num_layers, pp = case
    boundaries = layer_boundaries(num_layers, pp, None)
    shares = [second - first for first, second in itertools.pairwise(boundaries)]
    assert (boundaries[0], boundaries[-1], len(shares)) == (0, num_layers, pp)
    assert shares == sorted(shares)
    assert shares[-1] - shares[0] <= 1


@pytest.mark.parametrize("splits", [(), (0,), (30,), (10, 20), (40,)])
def test_splits_leave_every_stage_a_layer(splits: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfig, match=r"must be 1 increasing numbers \(pp - 1\) from 1 to 29"):
        layer_boundaries(30, 2, splits)


def test_more_stages_than_layers_have_no_boundaries() -> None:
    with pytest.raises(InvalidConfig, match="Choose pp from 1 to 2"):
        layer_boundaries(2, 3, None)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu amx_bf16 sse", "bfloat16"), ("fpu avx512_bf16", "bfloat16"), ("fpu avx2", "float32")],
)
def test_auto_dtype_follows_the_processor(tmp_path: Path, flags: str, expected: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    assert resolve_dtype("auto", cpuinfo) == expected
    assert resolve_dtype("float16", cpuinfo) == "float16"


def test_auto_dtype_without_processor_information(tmp_path: Path) -> None:
    assert resolve_dtype("auto", tmp_path / "none") == "float32"
