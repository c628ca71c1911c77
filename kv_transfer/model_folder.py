"""What a process must know of a model folder to plan for it, without torch or transformers.

Decides whether a Hugging Face folder can be used at all, what its KV looks like, how models are told apart, and
which ways of splitting it are possible. Does not know how the model computes: that an architecture can be built
and split is found out by the workers, who have `transformers`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, cast

from headwater.errors import InvalidConfig, ModelFolderError
from kv_transfer import checkpoint

# Names that older architectures use in config.json instead.
_ALIASES = {
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}

# Fields that do not change what a model computes; the element type is compared on its own. So are fields whose name
# starts with an underscore: the library's own notes.
_NO_EFFECT = frozenset(
    {
        "architectures",
        "attn_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

_MAX_SUGGESTED_TP = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFolder:
    """A usable model folder.

    `num_kv_heads`, `key_size` and `value_size` describe what the model hands to `Cache.update`. With multi-head
    latent attention (MLA: DeepSeek and its kin) that is, per token and layer, one head with the normalised latent of
    `kv_lora_rank` elements as its key and the rotated key part of `qk_rope_head_dim` elements, shared by all
    attention heads, as its value; keys and values proper are expanded from them at every use.
    """

    path: Path
    # For example "LlamaForCausalLM".
    architecture: str
    # For example "llama".
    model_type: str
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    hidden_size: int
    # Elements of one query head.
    head_size: int
    # Elements that the cache holds as the key, and as the value, of one head of one token.
    key_size: int
    value_size: int
    vocab_size: int
    max_context_tokens: int
    # Any of these ends an answer; may be empty.
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    # True for multi-head latent attention: every tensor-parallel rank holds the one KV head.
    has_latent_kv: bool
    # Elements in the safetensors files, buffers among them; a tied output embedding counts once if stored once.
    num_parameters: int
    model_fingerprint: str
    weights_fingerprint: str
    tokenizer_fingerprint: str


def read_model_folder(path: Path) -> ModelFolder:
    """Reads config.json, generation_config.json, tokenizer.json and the safetensors headers.

    Raises:
        ModelFolderError: the folder is missing, incomplete or damaged; the message names the file.
    """
    if not path.is_dir():
        raise ModelFolderError(
            f"no model folder {path}. Set model.path to a Hugging Face folder, or make one from a GGUF file with "
            "`headwater import-model`."
        )
    if not (path / "config.json").is_file():
        held = sorted(entry.name for entry in path.iterdir())
        raise ModelFolderError(
            f"{path} has no config.json, so it is not a Hugging Face model folder; it holds: "
            f"{', '.join(held) or 'nothing'}."
        )
    if not (path / "tokenizer.json").is_file():
        raise ModelFolderError(
            f"{path} has no tokenizer.json. Download it, or make it from the model's other tokenizer files with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)."
        )
    config = _Config(path / "config.json")
    tensors = checkpoint.list_tensors(path)
    num_attention_heads = config.number("num_attention_heads")
    hidden_size = config.number("hidden_size")
    latent_size = config.optional_number("kv_lora_rank")
    if latent_size is not None:
        rotated_size = config.number("qk_rope_head_dim")
        head_size = config.number("qk_nope_head_dim") + rotated_size
        num_kv_heads, key_size, value_size = 1, latent_size, rotated_size
    else:
        head_size = config.optional_number("head_dim") or hidden_size // num_attention_heads
        num_kv_heads = config.optional_number("num_key_value_heads") or num_attention_heads
        key_size = value_size = head_size
    has_output_embedding = any(tensor.name.endswith("lm_head.weight") for tensor in tensors)
    return ModelFolder(
        path=path,
        architecture=config.architecture(),
        model_type=config.model_type(),
        num_layers=config.number("num_hidden_layers"),
        num_attention_heads=num_attention_heads,
        num_kv_heads=num_kv_heads,
        hidden_size=hidden_size,
        head_size=head_size,
        key_size=key_size,
        value_size=value_size,
        vocab_size=config.number("vocab_size"),
        max_context_tokens=config.number("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(path, config),
        # Libraries leave the field out where it has its default, which changed over time; the files do not lie.
        tie_word_embeddings=bool(config.get("tie_word_embeddings", default=not has_output_embedding)),
        has_latent_kv=latent_size is not None,
        num_parameters=sum(tensor.num_elements for tensor in tensors),
        model_fingerprint=config.fingerprint(),
        weights_fingerprint=checkpoint.fingerprint(tensors),
        tokenizer_fingerprint=hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest(),
    )


def check_parallel(folder: ModelFolder, pp: int, tp: int) -> None:
    """Refuses numbers of stages and tensor-parallel ranks that the model cannot be split into.

    Raises:
        InvalidConfig: more stages than layers, or heads that `tp` does not divide; says what is possible.
    """
    name = folder.path.name
    if not 1 <= pp <= folder.num_layers:
        raise InvalidConfig(
            f"pp = {pp}: {name} has {folder.num_layers} layers, and a stage needs at least one. "
            f"Choose pp from 1 to {folder.num_layers}."
        )
    possible = [size for size in range(1, _MAX_SUGGESTED_TP + 1) if _divides_heads(folder, size)]
    if tp < 1 or not _divides_heads(folder, tp):
        kv_heads = "" if folder.has_latent_kv else f" and {folder.num_kv_heads} key/value heads"
        raise InvalidConfig(
            f"tp = {tp} does not divide {name}'s {folder.num_attention_heads} attention heads{kv_heads}. "
            f"Choose tp from {', '.join(map(str, possible))}."
        )


def layer_boundaries(num_layers: int, pp: int, splits: tuple[int, ...] | None) -> tuple[int, ...]:
    """First layer of each stage, and `num_layers` as the last entry: `pp + 1` numbers.

    Args:
        num_layers: layers of the model.
        pp: number of stages, at most `num_layers`.
        splits: first layer of each stage after the first. None: as even as it goes, with the larger shares on the
            later stages (61 layers on 4 stages: 15, 15, 15, 16).

    Raises:
        InvalidConfig: `splits` does not leave every stage at least one layer.
    """
    if splits is None:
        share, larger = divmod(num_layers, pp)
        if share < 1:
            raise InvalidConfig(f"pp = {pp}: the model has {num_layers} layers. Choose pp from 1 to {num_layers}.")
        return tuple(stage * share + max(0, stage - (pp - larger)) for stage in range(pp + 1))
    boundaries = (0, *splits, num_layers)
    if len(splits) != pp - 1 or any(first >= second for first, second in itertools.pairwise(boundaries)):
        raise InvalidConfig(
            f"layer_splits = {list(splits)}: must be {pp - 1} increasing numbers (pp - 1) from 1 to {num_layers - 1}, "
            f"because the model has {num_layers} layers and every stage needs one."
        )
    return boundaries


def resolve_dtype(dtype: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The element type that `dtype` means on this host.

    "auto" is bfloat16 where the processor multiplies it natively (AMX or AVX512-BF16), else float32.
    """
    if dtype != "auto":
        return dtype
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "float32"
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "bfloat16" if {"amx_bf16", "avx512_bf16"} & set(flags) else "float32"


def _divides_heads(folder: ModelFolder, tp: int) -> bool:
    return folder.num_attention_heads % tp == 0 and (folder.has_latent_kv or folder.num_kv_heads % tp == 0)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}. Download it again.") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object. Download it again.")
    return cast("dict[str, Any]", value)


class _Config:
    """config.json, in which the language model of a multimodal one is nested as `text_config`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = _read_json(path)
        nested = self._whole.get("text_config")
        self._levels = [nested, self._whole] if isinstance(nested, dict) else [self._whole]

    def get(self, name: str, default: object = None) -> object:
        for level in self._levels:
            for alias in (name, *_ALIASES.get(name, ())):
                if level.get(alias) is not None:
                    return cast("object", level[alias])
        return default

    def optional_number(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise ModelFolderError(f"{self._path}: {name} is {value!r}; it must be a positive whole number.")
        return value

    def number(self, name: str) -> int:
        value = self.optional_number(name)
        if value is None:
            raise ModelFolderError(f"{self._path} has no {name}. Is this a decoder-only language model?")
        return value

    def architecture(self) -> str:
        names = self._whole.get("architectures")
        if not isinstance(names, list) or not names:
            raise ModelFolderError(f"{self._path} has no architectures. Is this a model's config.json?")
        return str(names[0])

    def model_type(self) -> str:
        name = self.get("model_type")
        if not isinstance(name, str):
            raise ModelFolderError(f"{self._path} has no model_type. Is this a model's config.json?")
        return name

    def fingerprint(self) -> str:
        """SHA-256 over the fields that change results, in canonical JSON."""
        return hashlib.sha256(json.dumps(_effective(self._whole), sort_keys=True).encode()).hexdigest()


def _effective(value: object) -> object:
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key not in _NO_EFFECT and not key.startswith("_")}
        return {key: _effective(inner) for key, inner in kept.items()}
    return value


def _eos_token_ids(path: Path, config: _Config) -> tuple[int, ...]:
    value: object = None
    if (path / "generation_config.json").is_file():
        value = _read_json(path / "generation_config.json").get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelFolderError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them.")
    return tuple(ids)
