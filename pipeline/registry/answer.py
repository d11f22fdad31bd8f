"""What a registry answers, and the two ways in which it does not."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from urllib.parse import urljoin

from pipeline.errors import RegistryBroken
from pipeline.registry.words import shown


@dataclass(frozen=True)
class Answer:
    """A server's answer; `data` is its body where that was read."""

    status: int
    url: str
    raw: http.client.HTTPResponse
    data: bytes = b""

    def header(self, name: str) -> str:
        return self.raw.headers.get(name) or ""

    @property
    def location(self) -> str:
        """Where to go on, as a whole address."""
        found = self.header("Location")
        if not found:
            raise RegistryBroken(f"{shown(self.url)}: answers {self.status} without a Location")
        return urljoin(self.url, found)


class Lost(Exception):
    """A request that failed for now: the connection broke, or the server has a bad day."""

    def __init__(self, reason: str, retry_after: str = "") -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Refusal(RegistryBroken):
    """A status that no step expects; some steps know what to make of it."""

    def __init__(self, message: str, status: int, codes: frozenset[str]) -> None:
        super().__init__(message)
        self.status, self.codes = status, codes
