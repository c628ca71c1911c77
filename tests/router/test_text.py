"""The model folder's tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.errors import InvalidRequest, ModelFolderError
from router.text import Text, load_text
from tests.router.fakes import tiny_tokenizer

USER = [{"role": "user", "content": "hi"}]


def folder(path: Path, **config: object) -> Path:
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    folder(tmp_path, chat_template="old", bos_token={"content": "<s>"})
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}", encoding="utf-8")
    assert load_text(tmp_path).render_chat(USER) == "<s>hi"


@pytest.mark.parametrize(
    "template", ["new {{ messages[0].content }}", [{"name": "default", "template": "new {{ messages[0].content }}"}]]
)
def test_template_of_the_configuration(tmp_path: Path, template: object) -> None:
    assert load_text(folder(tmp_path, chat_template=template)).render_chat(USER) == "new hi"


def test_template_sees_what_transformers_gives_it() -> None:
    template = (
        "{%- for message in messages %}\n  {% generation %}{{ message | tojson }}{% endgeneration %}\n"
        "{% break %}{% endfor %}{{ add_generation_prompt }} {{ eos_token }}{{ tools is defined and tools }}"
    )
    text = Text(tiny_tokenizer(), template, {"eos_token": "<e>"})
    assert text.render_chat(USER) == '{"role": "user", "content": "hi"}True <e>False'


def test_chat_is_encoded_as_rendered() -> None:
    text = Text(tiny_tokenizer(), "{{ messages[0].content }}<|end|>", {})
    assert text.encode_chat(USER) == [*tiny_tokenizer().encode("hi").ids, 0]


def test_model_without_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template; send the prompt as text"):
        Text(tiny_tokenizer(), None, {}).render_chat(USER)


def test_template_is_sandboxed() -> None:
    with pytest.raises(InvalidRequest, match="refuses the messages"):
        Text(tiny_tokenizer(), "{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render_chat(USER)


def test_invalid_template_names_the_line() -> None:
    with pytest.raises(ModelFolderError, match="not valid, line 2"):
        Text(tiny_tokenizer(), "\n{% if %}", {}).render_chat(USER)


def test_truncation_of_the_training_run_is_ignored(tmp_path: Path) -> None:
    folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    settings["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    assert len(load_text(tmp_path).encode("q" * 50)) > 3


def test_unreadable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="has no tokenizer.json"):
        load_text(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFolderError, match="tokenizer.json cannot be read"):
        load_text(tmp_path)
