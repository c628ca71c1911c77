"""Token ids to text, one token at a time, up to a stop string.

Only text that no later token can change is given out. Two things are held back: the start of a character
whose bytes are not all there, and the start of a possible stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

# What decoding shows for bytes that are not (yet) a character.
_REPLACEMENT = "\ufffd"
# Tokens without any final text after which the window is cut, so that a token's cost stays bounded.
_LONGEST_WINDOW = 16


class TextStream:
    """The text of one answer.

    `"".join(pushes) + finish()` equals decoding all tokens at once, special tokens skipped, cut before the
    stop string that is complete first (of several that are, the longest).

    Args:
        stop: stop strings, none of them empty.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: Sequence[str] = ()) -> None:
        self._characters = _Characters(tokenizer)
        self._stop = tuple(stop)
        # Final text that may be the start of a stop string.
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that became final with this token; empty once stopped."""
        return self._release(self._characters.push(token_id))

    def finish(self) -> str:
        """The rest, when no token follows."""
        text = self._release(self._characters.finish())
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        cut = self._first_stop(text)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string begins that ends first."""
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        return min(found)[1] if found else None

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class _Characters:
    """Incremental decoding over a sliding window, after the prefix and read offsets of
    text-generation-inference and vLLM.

    The window is `context + pending`: tokens whose text was given out, kept because a decoder may treat the
    first token of a text differently, and tokens whose text was not.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._special or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        if text and not text.endswith(_REPLACEMENT):
            self._context, self._pending = self._pending, []
            return text
        if len(self._pending) >= _LONGEST_WINDOW:
            return self._cut(text)
        return ""

    def finish(self) -> str:
        text = self._pending_text() if self._pending else ""
        self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        given = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(given) :]

    def _cut(self, text: str) -> str:
        """Gives out all but the last token of a long run of bytes that are no characters.

        That is final if the last token's bytes stand alone: then they did not continue what came before.
        """
        last = self._decode(self._pending[-1:])
        before = self._decode(self._context + self._pending[:-1])[len(self._decode(self._context)) :]
        if not last or before + last != text:
            return ""
        self._context, self._pending = [], self._pending[-1:]
        return before

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
