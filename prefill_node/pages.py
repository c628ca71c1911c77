"""The leader's page pool: which pages are free and which request holds the others.

Page numbers are valid on every rank, since every rank keeps its own layers and heads of the same pages.
"""

from __future__ import annotations

from headwater.errors import CapacityError


class PagePool:
    """`num_pages` pages of `page_size` tokens. free + held = total."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # Sorted, so that a request gets neighbouring pages where it can: runs are read without copying.
        self._free = list(range(num_pages))
        self._held: dict[str, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def take(self, owner: str, num_tokens: int) -> list[int]:
        """Pages for `num_tokens` tokens, the lowest run that is long enough, else the lowest free pages.

        Raises:
            CapacityError: not enough free pages; nothing changes.
        """
        count = self.pages_for(num_tokens)
        if count > len(self._free):
            raise CapacityError(f"{count} pages were asked for and {len(self._free)} of {self.num_pages} are free.")
        if owner in self._held:
            raise AssertionError(f"{owner} already holds pages")
        start = self._first_run(count)
        pages = self._free[start : start + count]
        del self._free[start : start + count]
        self._held[owner] = pages
        return pages

    def give_back(self, owner: str) -> None:
        """The owner's pages are free again."""
        self._free += self._held.pop(owner)
        # Two sorted runs, mostly: cheap.
        self._free.sort()

    def check(self) -> None:
        """Raises AssertionError unless every page is free or held, once."""
        places = sorted([*self._free, *(page for pages in self._held.values() for page in pages)])
        if places != list(range(self.num_pages)):
            raise AssertionError(f"pages do not balance: {len(places)} places for {self.num_pages} pages")

    def _first_run(self, count: int) -> int:
        for start in range(len(self._free) - count + 1):
            if self._free[start + count - 1] - self._free[start] == count - 1:
                return start
        return 0
