"""A registry's own reasons, as its errors state them."""

from __future__ import annotations

from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.net.address import clean

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
