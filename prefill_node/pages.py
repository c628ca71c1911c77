"""The leader's page pool: which pages are empty, which requests hold the others, and which are kept for later requests.

Page numbers are valid on every rank, since every rank keeps its own layers and heads of the same pages.

| a page is | who reads or writes it | becomes |
| --- | --- | --- |
| empty | nobody | *own* by `take` |
| own | one request | *shared* by `computed`; empty by `give_back` |
| shared | any number of requests read it, nobody writes | *cached* when the last of them gives it back |
| cached | nobody | *shared* by `take`; empty when pages are needed, the longest unused first |

Without `keep_prefixes` pages are empty or own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headwater.errors import CapacityError
from headwater.tokens import TOKEN_BYTES
from prefill_node.prefix_cache import PrefixCache


@dataclasses.dataclass(slots=True)
class _Held:
    """What one request holds.

    Attributes:
        own: pages that nobody else has.
        table: page of each of its pages' worth of tokens.
        known: the pages that its first full pages are known by. Where another request was faster to compute the same
            tokens, that one's page is known, and this one holds both.
    """

    own: set[int]
    table: list[int]
    known: list[int]


class PagePool:
    """`num_pages` pages of `page_size` tokens. empty + cached + held (own or shared) = total."""

    def __init__(self, num_pages: int, page_size: int, *, keep_prefixes: bool = False) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # Sorted, so that a request gets neighbouring pages where it can: runs are read without copying.
        self._empty = list(range(num_pages))
        self._held: dict[str, _Held] = {}
        self._cache = PrefixCache(page_size) if keep_prefixes else None

    @property
    def keeps_prefixes(self) -> bool:
        return self._cache is not None

    @property
    def free_pages(self) -> int:
        """Pages that no request holds: empty or cached."""
        return len(self._empty) + self.cached_pages

    @property
    def cached_pages(self) -> int:
        """Pages that no request holds and whose KV is kept until they are needed."""
        return self._cache.num_idle if self._cache is not None else 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def find(self, tokens: bytes) -> list[int]:
        """Pages, own ones of nobody, with the KV of the longest known beginning of a prompt; its last token is never in
        them. They may be given to `take` until anything else is done with this pool.
        """
        return self._cache.find(tokens) if self._cache is not None else []

    def fits(self, num_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Whether `take` would succeed."""
        return self.pages_for(num_tokens) - len(shared) <= self._room(shared)

    def take(self, owner: str, num_tokens: int, shared: Sequence[int] = ()) -> list[int]:
        """Pages for `num_tokens` tokens: `shared`, which the owner may only read, and then own ones; the lowest run
        that is long enough, else the lowest ones.

        Raises:
            CapacityError: not enough free pages; nothing changes.
        """
        count = self.pages_for(num_tokens) - len(shared)
        if count > self._room(shared):
            raise CapacityError(f"{count} pages were asked for and {self._room(shared)} of {self.num_pages} are free.")
        if owner in self._held:
            raise AssertionError(f"{owner} already holds pages")
        if self._cache is not None:
            for page in shared:
                self._cache.hold(page)
            if count > len(self._empty):
                self._empty += [self._cache.evict() for _ in range(count - len(self._empty))]
                self._empty.sort()
        start = self._first_run(count)
        own = self._empty[start : start + count]
        del self._empty[start : start + count]
        self._held[owner] = _Held(set(own), [*shared, *own], list(shared))
        return list(self._held[owner].table)

    def computed(self, owner: str, tokens: bytes, num_tokens: int) -> None:
        """The KV of the first `num_tokens` of the owner's `tokens` is in its pages on every rank, and nothing will
        write there any more: its full pages may be shared from now on.
        """
        if self._cache is None:
            return
        held, size = self._held[owner], self.page_size * TOKEN_BYTES
        for number in range(len(held.known), num_tokens // self.page_size):
            before = held.known[-1] if held.known else None
            page = held.table[number]
            known = self._cache.add(before, tokens[number * size : (number + 1) * size], page)
            # Also when it is another request's: what comes after it is only known as long as it is.
            self._cache.hold(known)
            held.known.append(known)
            if known == page:
                held.own.remove(page)

    def give_back(self, owner: str) -> None:
        """The owner's pages are empty again, or kept for others."""
        held = self._held.pop(owner)
        if self._cache is not None:
            for page in reversed(held.known):
                self._cache.let_go(page)
        self._empty += sorted(held.own)
        # Two sorted runs, mostly: cheap.
        self._empty.sort()

    def check(self) -> None:
        """Raises AssertionError unless every page is empty, own, shared or cached, once."""
        known = self._cache.pages if self._cache is not None else []
        places = sorted([*self._empty, *known, *(page for held in self._held.values() for page in held.own)])
        if places != list(range(self.num_pages)):
            raise AssertionError(f"pages do not balance: {len(places)} places for {self.num_pages} pages")

    def check_idle(self) -> None:
        """Raises AssertionError unless every page is empty or cached. Quick."""
        if self._held or self.free_pages != self.num_pages:
            raise AssertionError(
                f"nothing runs, and {len(self._held)} requests hold pages; {len(self._empty)} pages are empty and "
                f"{self.cached_pages} cached, of {self.num_pages}"
            )

    def _room(self, shared: Sequence[int]) -> int:
        """Pages that are free when `shared` are held."""
        idle = sum(self._cache.is_idle(page) for page in shared) if self._cache is not None else 0
        return self.free_pages - idle

    def _first_run(self, count: int) -> int:
        for start in range(len(self._empty) - count + 1):
            if self._empty[start + count - 1] - self._empty[start] == count - 1:
                return start
        return 0
