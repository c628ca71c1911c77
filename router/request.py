"""From what a client sent to what the groups are asked: checks, tokenisation and defaults.

Whatever can be known to be impossible is refused here, before any group hears of the request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence

from headwater.errors import InvalidRequest
from headwater.tokens import TOKEN_BYTES, pack
from headwater.v1 import common_pb2, router_pb2
from router.prefixes import blocks_of
from router.text import Text

# A longer text is tokenised in a thread, because it would hold up everybody's tokens.
_LONG_TEXT_CHARACTERS = 10_000
_LONGEST_REQUEST_ID = 128


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """What the router knows of the model that its groups serve."""

    text: Text
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A request that can work."""

    request_id: str
    # As in PrefillRequest.
    tokens: bytes
    sampling: common_pb2.SamplingParams
    stop: common_pb2.StopConditions
    priority: int
    # What the prompt begins with, for whoever knows where it is cached (`router.prefixes`).
    blocks: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


async def prepare(request: router_pb2.GenerateRequest, request_id: str, model: ServedModel) -> Job:
    """Checks a request and tokenises its prompt.

    Raises:
        InvalidRequest: it can never work; the message says which value is wrong and what is allowed.
    """
    if len(request_id) > _LONGEST_REQUEST_ID:
        raise InvalidRequest(f"request_id has {len(request_id)} characters; {_LONGEST_REQUEST_ID} are allowed.")
    _check_max_tokens(request.max_tokens, model)
    sampling = _sampling(request)
    if "" in request.stop:
        raise InvalidRequest("a stop string is empty; leave it out.")
    token_ids = await _token_ids(request, model)
    _check_length(len(token_ids), request.max_tokens, model)
    stop = common_pb2.StopConditions(
        max_tokens=request.max_tokens,
        eos_token_ids=() if request.ignore_eos else model.eos_token_ids,
        stop=request.stop,
    )
    tokens = pack(token_ids)
    return Job(request_id, tokens, sampling, stop, request.priority, blocks_of(tokens))


def _check_max_tokens(max_tokens: int, model: ServedModel) -> None:
    if max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}; it must be at least 1 (the model's context is {model.max_context_tokens})."
        )


def _sampling(request: router_pb2.GenerateRequest) -> common_pb2.SamplingParams:
    wanted = request.sampling
    if not (math.isfinite(wanted.temperature) and wanted.temperature >= 0):
        raise InvalidRequest(f"temperature is {wanted.temperature:g}; it must be 0 (greedy) or more.")
    if not 0 <= wanted.top_p <= 1:
        raise InvalidRequest(f"top_p is {wanted.top_p:g}; it must be in (0, 1], or 0 for the default of 1.")
    return common_pb2.SamplingParams(
        temperature=wanted.temperature,
        top_p=wanted.top_p or 1.0,
        seed=wanted.seed if request.has_seed else secrets.randbits(63),
    )


async def _token_ids(request: router_pb2.GenerateRequest, model: ServedModel) -> Sequence[int]:
    match request.WhichOneof("prompt"):
        case "text":
            text = request.text
            token_ids = await _tokenise(lambda: model.text.encode(text), len(text)) if text else []
        case "chat":
            messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
            characters = sum(len(message["content"]) for message in messages)
            token_ids = await _tokenise(lambda: model.text.encode_chat(messages), characters) if messages else []
        case "token_ids":
            token_ids = list(request.token_ids.ids)
        case _:
            raise InvalidRequest("the request has no prompt; set text, token_ids or chat.")
    if not token_ids:
        raise InvalidRequest("the prompt is empty; it must have at least one token.")
    largest = max(token_ids)
    if largest >= model.vocab_size:
        raise InvalidRequest(
            f"token id {largest} at position {token_ids.index(largest)} is not in the vocabulary; "
            f"ids go from 0 to {model.vocab_size - 1}."
        )
    return token_ids


async def _tokenise(encode: Callable[[], list[int]], characters: int) -> list[int]:
    return await asyncio.to_thread(encode) if characters > _LONG_TEXT_CHARACTERS else encode()


def _check_length(num_prompt_tokens: int, max_tokens: int, model: ServedModel) -> None:
    context = model.max_context_tokens
    if num_prompt_tokens >= context:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens, and the model's context is {context} for prompt and "
            f"answer together. Shorten the prompt to at most {context - 1} tokens."
        )
    if num_prompt_tokens + max_tokens > context:
        raise InvalidRequest(
            f"prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens}) make "
            f"{num_prompt_tokens + max_tokens}, and the model's context is {context}. "
            f"Lower max_tokens to at most {context - num_prompt_tokens}, or shorten the prompt."
        )
