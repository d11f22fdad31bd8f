"""Lists that come page by page: every page is a new one, and there is an end to them."""

from __future__ import annotations

import time

from pipeline.net.failures import BadAnswer


class Pages:
    """Counts the pages of one list."""

    def __init__(self, what: str, most_pages: int, most_s: float) -> None:
        self._what, self._most_pages, self._most_s = what, most_pages, most_s
        self._until = time.monotonic() + most_s
        self._seen: set[str] = set()

    def take(self, address: str) -> None:
        """The next page is there; `BadAnswer` where the list would never end."""
        if address in self._seen:
            raise BadAnswer(f"{self._what} goes round in a circle and does not end")
        self._seen.add(address)
        if len(self._seen) > self._most_pages:
            raise BadAnswer(f"{self._what} does not end: more than {self._most_pages} pages")
        if time.monotonic() > self._until:
            raise BadAnswer(f"{self._what} does not end: more than {self._most_s:g} s")
