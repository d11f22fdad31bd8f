"""A registry's redirects and refusals."""

from __future__ import annotations

from urllib.parse import urljoin

from pipeline.errors import RegistryBroken
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.net.address import clean, shown
from pipeline.net.answer import Answer
from pipeline.net.client import Reply


def location_of(answer: Reply | Answer) -> str:
    """The `Location` of an answer as a whole address."""
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
    """An unexpected status; some callers can handle it by its status or codes."""

    def __init__(self, message: str, status: int, codes: frozenset[str]) -> None:
        super().__init__(message)
        self.status, self.codes = status, codes


MOST_ERROR_BYTES = 8192


def error_message(data: bytes) -> tuple[str, frozenset[str]]:
    """The message of a registry's error body, and its error codes.

    https://github.com/opencontainers/distribution-spec/blob/main/spec.md#error-codes
    """
    try:
        errors = read_json(data, most_bytes=MOST_ERROR_BYTES)["errors"]
        rows = [(str(e.get("code", "")), str(e.get("message", ""))) for e in errors[:3]]
    except (JsonInvalid, KeyError, TypeError, AttributeError):
        return "", frozenset()
    text = "; ".join(" ".join(row) for row in rows)
    return (f" ({clean(text)})" if text else ""), frozenset(code for code, _ in rows)
