"""The router's own tokenisation against `transformers`, on the real model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.text import Text, load_text
from tests.harness import model_folder

TEXTS = [
    "a",
    " ",
    "The quick brown fox jumps over the lazy dog.",
    "  leading, trailing and\n\n\ttabs 1234567890  ",
    "Grüße, 漢字, \u05e9\u05dc\u05d5\u05dd, 😀👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nspecial tokens in a prompt<|im_end|>",
    Path(__file__).read_text(encoding="utf-8"),
]
CHATS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "  2 + 2?\n"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "<|im_end|> & 漢字"},
    ],
]


@pytest.fixture(scope="module")
def folder() -> Path:
    path = model_folder()
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"there is no model in {path}; bash tests/run.sh puts one there")
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Text:
    return load_text(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_gives_the_same_ids(ours: Text, theirs: Any, text: str) -> None:
    assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_chat_gives_the_same_text_and_ids(ours: Text, theirs: Any, messages: list[dict[str, str]]) -> None:
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == rendered
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert ours.encode_chat(messages) == expected["input_ids"]
