"""The safetensors files of a model folder, examined without loading them.

Decides whether the files are all there and whole, what they hold and how weights are told apart. Knows neither
tensors nor the model: it reads headers and the first bytes of each tensor with plain file reads.
Format: https://huggingface.co/docs/safetensors/index#format.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import msgspec

from headwater.errors import ModelFolderError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SAMPLE_BYTES = 4096
# The library's own limit.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_GIT_LFS_POINTER = b"version https://git-lfs"


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in a header."""

    dtype: str
    shape: tuple[int, ...]
    # Relative to the end of the header.
    data_offsets: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor is: bytes [start, end) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """Stored elements; fewer than parameters where several are packed in one."""
        return math.prod(self.shape)


def list_tensors(folder: Path) -> tuple[StoredTensor, ...]:
    """The tensors of `folder`, sorted by name.

    Raises:
        ModelFolderError: no safetensors, or a file that is missing, truncated or not safetensors.
    """
    if (folder / SINGLE_FILE).is_file():
        tensors = _read_header(folder / SINGLE_FILE)
    elif (folder / INDEX_FILE).is_file():
        tensors = _read_shards(folder)
    else:
        raise ModelFolderError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}. {_others(folder)}"
            "Headwater reads safetensors only: convert the model with save_pretrained, or a GGUF file with "
            "`headwater import-model`."
        )
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


def fingerprint(tensors: tuple[StoredTensor, ...]) -> str:
    """SHA-256 over name, dtype, shape and first 4 KiB of every tensor, in the order of names.

    A sample and not all bytes: some hundred megabytes instead of 600 GB for the largest checkpoints, and any other
    training run or quantisation differs in it. It tells different weights apart; it does not prove that a download
    is free of bit errors. How tensors are distributed over files does not matter.
    """
    samples: dict[str, bytes] = {}
    for file in sorted({tensor.file for tensor in tensors}):
        with file.open("rb") as stored:
            for tensor in (tensor for tensor in tensors if tensor.file == file):
                stored.seek(tensor.start)
                samples[tensor.name] = stored.read(min(_SAMPLE_BYTES, tensor.end - tensor.start))
    digest = hashlib.sha256()
    for tensor in tensors:
        described = json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode()
        digest.update(described + hashlib.sha256(samples[tensor.name]).digest())
    return digest.hexdigest()


def _others(folder: Path) -> str:
    weights = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".gguf", ".pt", ".pth"})
    return f"It has {', '.join(weights)}. " if weights else ""


def _read_shards(folder: Path) -> list[StoredTensor]:
    index = folder / INDEX_FILE
    try:
        weight_map = msgspec.convert(json.loads(index.read_bytes())["weight_map"], dict[str, str])
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(f"{index} is not a safetensors index: {error!r}. Download it again.") from error
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise ModelFolderError(f"{index} names {shard!r}, which is not a file of this folder. Download it again.")
        if not (folder / shard).is_file():
            raise ModelFolderError(
                f"{folder} lacks {shard}, one of the {len(shards)} shards that {INDEX_FILE} names. Download it."
            )
    found = {(shard, tensor.name): tensor for shard in shards for tensor in _read_header(folder / shard)}
    for name, shard in weight_map.items():
        if (shard, name) not in found:
            raise ModelFolderError(
                f"{folder / shard} lacks the tensor {name} that {INDEX_FILE} says it holds. Download both again."
            )
    return [found[shard, name] for name, shard in weight_map.items()]


def _read_header(path: Path) -> list[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(len(_GIT_LFS_POINTER))
        if prefix == _GIT_LFS_POINTER:
            raise ModelFolderError(f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder.")
        header_bytes = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
        begin = _LENGTH_BYTES + header_bytes
        if size >= _LENGTH_BYTES and header_bytes > _MAX_HEADER_BYTES:
            raise ModelFolderError(f"{path} is not a safetensors file. Download it again.")
        if size < begin or size < _LENGTH_BYTES:
            raise _truncated(path, max(begin, _LENGTH_BYTES), size)
        file.seek(_LENGTH_BYTES)
        raw = file.read(header_bytes)
    try:
        header: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        header.pop("__metadata__", None)
        entries = msgspec.convert(header, dict[str, _Entry])
    except msgspec.MsgspecError as error:
        raise ModelFolderError(f"{path} is not a safetensors file: {error}. Download it again.") from error
    end = begin + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size < end:
        raise _truncated(path, end, size)
    if size > end:
        raise ModelFolderError(f"{path} is damaged: {end} bytes expected, {size} found. Download it again.")
    return [
        StoredTensor(name, entry.dtype, entry.shape, path, begin + entry.data_offsets[0], begin + entry.data_offsets[1])
        for name, entry in entries.items()
    ]


def _truncated(path: Path, expected: int, found: int) -> ModelFolderError:
    return ModelFolderError(f"{path} is truncated: {found} of {expected} bytes. Download it again.")
