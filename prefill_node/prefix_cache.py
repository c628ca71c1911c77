"""Which pages hold the KV of which beginnings of prompts, and which of those are emptied first.

A page is known by the page before it and by its own tokens, compared in full. A digest would do for honest prompts, but
those that are fast enough can be made to collide, and then one client's answer would depend on another one's prompt;
the tokens of a page cost 4 bytes each, where their KV costs tens of thousands.

Whoever holds a page holds all pages before it, and lets go of the last one first. So among the pages that nobody holds,
whichever was let go of longest ago has no page after it that is still known.
"""

from __future__ import annotations

from collections import OrderedDict

from headwater.tokens import TOKEN_BYTES

# Stands for the page before the first one.
_NO_PAGE = -1


class PrefixCache:
    """Known pages of `page_size` tokens, each held by any number of requests or by nobody (idle)."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        # By the page before and the tokens; and the inverse.
        self._pages: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}
        # How many requests hold a page that is held.
        self._holders: dict[int, int] = {}
        # Longest idle first. A plain dict takes longer the more has been removed from its beginning.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def pages(self) -> list[int]:
        """All known pages."""
        return list(self._keys)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def find(self, tokens: bytes) -> list[int]:
        """The pages of the longest known beginning of a prompt that leaves at least its last token to be computed."""
        size = self.page_size * TOKEN_BYTES
        found: list[int] = []
        before = _NO_PAGE
        for start in range(0, len(tokens) - size, size):
            page = self._pages.get((before, tokens[start : start + size]))
            if page is None:
                break
            found.append(page)
            before = page
        return found

    def add(self, before: int | None, tokens: bytes, page: int) -> int:
        """Makes the KV of a full page known, and returns the page that it is known by: `page`, or the one that
        already was.

        Args:
            before: the known page of the tokens before, held by whoever holds `page`; None: there are none.
        """
        key = (_NO_PAGE if before is None else before, tokens)
        known = self._pages.setdefault(key, page)
        if known == page:
            self._keys[page] = key
            self._idle[page] = None
        return known

    def hold(self, page: int) -> None:
        """One more request reads the page; it holds those before already."""
        self._idle.pop(page, None)
        self._holders[page] = self._holders.get(page, 0) + 1

    def let_go(self, page: int) -> None:
        """One request less; it has let go of those after."""
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            self._idle[page] = None

    def evict(self) -> int:
        """Forgets the page that has been idle longest. At least one must be."""
        page, _ = self._idle.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        return page
