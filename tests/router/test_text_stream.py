"""Incremental detokenisation against decoding everything at once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.text_stream import TextStream
from tests.router.fakes import EOS_TEXT, tiny_tokenizer

# All 300 tokens, most of them single bytes: random ones rarely make characters.
ANY_TOKENS = st.lists(st.integers(0, 299), max_size=80)
TEXTS = st.text(alphabet="the fox漢字😀é\n" + "ab", max_size=60)
STOPS = st.lists(st.text(alphabet="abthe fox😀", min_size=1, max_size=4), max_size=3)


def pushed(tokens: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], str, bool]:
    stream = TextStream(tiny_tokenizer(), stop)
    pieces = [stream.push(token) for token in tokens]
    return pieces, stream.finish(), stream.stopped


def cut(text: str, stop: Sequence[str]) -> str:
    """Before the stop string that is complete first, by brute force."""
    for end in range(1, len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)]
    return text


@given(ANY_TOKENS)
def test_any_tokens_give_the_whole_text(tokens: list[int]) -> None:
    pieces, rest, stopped = pushed(tokens)
    assert "".join(pieces) + rest == tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    assert not stopped


@given(ANY_TOKENS, STOPS)
def test_any_tokens_are_cut_before_the_first_stop_string(tokens: list[int], stop: list[str]) -> None:
    pieces, rest, _ = pushed(tokens, stop)
    assert "".join(pieces) + rest == cut(tiny_tokenizer().decode(tokens, skip_special_tokens=True), stop)


@given(TEXTS, STOPS)
def test_text_is_cut_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, rest, stopped = pushed(tiny_tokenizer().encode(text).ids, stop)
    assert "".join(pieces) + rest == cut(text, stop)
    assert stopped == any(one in text for one in stop)


@given(TEXTS)
def test_no_half_character_is_given_out(text: str) -> None:
    pieces, rest, _ = pushed(tiny_tokenizer().encode(text).ids)
    assert "\ufffd" not in "".join(pieces)
    assert rest == ""


@given(TEXTS, STOPS)
def test_what_is_given_out_is_never_taken_back(text: str, stop: list[str]) -> None:
    stream = TextStream(tiny_tokenizer(), stop)
    given_out = ""
    for token in tiny_tokenizer().encode(text).ids:
        given_out += stream.push(token)
        assert cut(text, stop).startswith(given_out)


def test_incomplete_character_at_the_end_is_shown_by_finish() -> None:
    tokens = tiny_tokenizer().encode("\U0001f680").ids
    # Which of its four bytes are merged depends on the trainer's ties.
    assert len(tokens) > 1
    assert pushed(tokens[:-1]) == ([""] * (len(tokens) - 1), "\ufffd", False)


def test_special_tokens_show_nothing() -> None:
    eos = tiny_tokenizer().token_to_id(EOS_TEXT)
    assert eos is not None
    fox = tiny_tokenizer().encode("fox").ids
    pieces, rest, _ = pushed([eos, *fox, eos, 5000])
    assert "".join(pieces) + rest == "fox"


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(tiny_tokenizer(), ["x"])
    given_out = [stream.push(token) for token in tiny_tokenizer().encode("fox jumps over").ids]
    assert "".join(given_out) + stream.finish() == "fo"


def test_long_runs_of_bytes_that_are_no_characters_are_given_out_in_between() -> None:
    lone_byte = tiny_tokenizer().encode("é").ids[-1]
    pieces, rest, _ = pushed([lone_byte] * 200)
    assert "".join(pieces) + rest == "\ufffd" * 200
    assert len(rest) < 20
