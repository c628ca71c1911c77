"""GGUF to a Hugging Face folder: what `headwater import-model` does.

Decides what a usable model folder is made of and that it appears whole or not at all. How GGUF tensors are named
and dequantised is the business of the `transformers` GGUF loader.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from headwater.errors import InvalidConfig, ModelFolderError

_MAGIC = b"GGUF"
# What a model folder must contain. chat_template.jinja comes too, unless the GGUF is of a base model and has none.
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def import_model(gguf: Path, folder: Path) -> None:
    """Converts one GGUF file to a folder with config, float32 safetensors and tokenizer.

    The folder is made beside its final place and renamed at the end, so an interrupted import leaves no `folder`.

    Args:
        gguf: the file; an architecture that the `transformers` GGUF loader knows.
        folder: does not exist yet, or is empty.

    Raises:
        InvalidConfig: `gguf` and `folder` cannot be used as given, or a needed package is not installed.
        ModelFolderError: the file is not a GGUF, or does not hold a model that can be loaded.
    """
    _check_source(gguf)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InvalidConfig(f"{folder} exists and is not an empty folder. Remove it or choose another name.")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidConfig(
            f"import-model needs {' and '.join(missing)}, not installed here. Run: pip install 'headwater[gguf]'."
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise InvalidConfig(f"cannot write to {folder.parent}: {error.strerror}. Choose another folder.") from error
    try:
        _convert(gguf, made)
        _check_result(gguf, made)
        # mkdtemp's folder is private; a model folder is not.
        made.chmod(0o755)
        for path in made.iterdir():
            path.chmod(0o644)
        made.replace(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _check_source(gguf: Path) -> None:
    if not gguf.is_file():
        raise InvalidConfig(f"no file {gguf}. Give the path of a .gguf file.")
    with gguf.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise ModelFolderError(
            f"{gguf} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}. Check what was downloaded."
        )


def _convert(gguf: Path, made: Path) -> None:
    # Seconds of import time that no other subcommand should pay.
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    source = str(gguf.parent.resolve())
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, local_files_only=True)
    # The loader has no error type of its own: damaged files surface as whatever the parser tripped over.
    except Exception as error:
        raise ModelFolderError(
            f"{gguf} cannot be loaded: {error}. The file is damaged, or its architecture is not one that "
            "the transformers GGUF loader knows."
        ) from error
    # The weights are plain float32 now, but still marked as GGUF-quantised, which save_pretrained refuses.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.save_pretrained(made)
    model.save_pretrained(made, max_shard_size="1TB")


def _check_result(gguf: Path, made: Path) -> None:
    missing = [name for name in _FILES if not (made / name).is_file()]
    if missing:
        raise ModelFolderError(f"{gguf} gave no {', '.join(missing)}; it lacks what those files are made from.")
