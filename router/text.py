"""Text to token ids: the model folder's tokenizer and its chat template.

Built on `tokenizers` and `jinja2` alone; renders templates the way `transformers` does.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from headwater.errors import InvalidRequest, ModelFolderError


class Text:
    """One model's tokenizer and chat template. Safe to call from several threads."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._special_tokens = special_tokens
        # A tokenizer.json may carry settings of its training run.
        tokenizer.no_truncation()
        tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds around a text."""
        return list(self.tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, rendered by the model's template up to where its answer begins.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the messages.
            ModelFolderError: the template is not valid.
        """
        return list(self.tokenizer.encode(self.render_chat(messages), add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that `encode_chat` encodes."""
        if self._template is None:
            raise InvalidRequest("the model has no chat template; send the prompt as text or token_ids.")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}") from error

    @functools.cached_property
    def _template(self) -> jinja2.Template | None:
        if self._chat_template is None:
            return None
        try:
            return _environment().from_string(self._chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFolderError(f"the model's chat template is not valid, line {error.lineno}: {error}") from error


def load_text(folder: Path) -> Text:
    """Reads tokenizer.json, and the chat template from chat_template.jinja or tokenizer_config.json.

    Raises:
        ModelFolderError: a file is missing or cannot be parsed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFolderError(f"{folder} has no tokenizer.json; a fast tokenizer is needed.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    config = _read_config(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        template: str | None = template_file.read_text(encoding="utf-8")
    else:
        template = _default_template(config.get("chat_template"))
    return Text(tokenizer, template, _special_tokens(config))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFolderError(f"{path} is not a JSON object.")
    return config


def _default_template(value: Any) -> str | None:
    """A template, or a list of named ones of which one is called "default"."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind, which are strings or serialised added tokens."""
    found: dict[str, str] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the model's own words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Without jinja2's HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
