"""Where a registry's answers lead, and how it refuses."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urljoin

from pipeline.errors import RegistryBroken
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.net.address import clean, shown


class Head(Protocol):
    """What is known of an answer before its body."""

    @property
    def status(self) -> int: ...

    @property
    def url(self) -> str: ...

    def header(self, name: str) -> str: ...


def location_of(answer: Head) -> str:
    """Where to go on, as a whole address."""
    place = answer.header("Location")
    if not place:
        raise RegistryBroken(f"{shown(answer.url)}: answers {answer.status} without a Location")
    try:
        return urljoin(answer.url, place)
    except ValueError as error:
        raise RegistryBroken(
            f"{shown(answer.url)}: redirects to {shown(place)!r}, which is not a valid address"
        ) from error


class Refusal(RegistryBroken):
    """A status that no step expects; some steps know what to make of it."""

    def __init__(self, message: str, status: int, codes: frozenset[str]) -> None:
        super().__init__(message)
        self.status, self.codes = status, codes


MOST_ERROR_BYTES = 8192


def error_words(data: bytes) -> tuple[str, frozenset[str]]:
    """The registry's own words, and its error codes."""
    try:
        found = read_json(data, most_bytes=MOST_ERROR_BYTES)["errors"]
        rows = [(str(e.get("code", "")), str(e.get("message", ""))) for e in found[:3]]
    except (JsonInvalid, KeyError, TypeError, AttributeError):
        return "", frozenset()
    told = "; ".join(" ".join(row) for row in rows)
    return (f" ({clean(told)})" if told else ""), frozenset(code for code, _ in rows)
