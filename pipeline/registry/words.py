"""What is said about requests: a server's words and addresses, fit for a terminal."""

from __future__ import annotations

import email.utils
import http.client
import json
import re
import time


def error_words(data: bytes) -> tuple[str, frozenset[str]]:
    """The registry's own words, and its error codes."""
    try:
        found = json.loads(data)["errors"]
        rows = [(str(e.get("code", "")), str(e.get("message", ""))) for e in found[:3]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", frozenset()
    told = "; ".join(" ".join(row) for row in rows)
    return (f" ({clean(told)})" if told else ""), frozenset(code for code, _ in rows)


def clean(text: str) -> str:
    """A stranger's words without what would steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:200]


def shown(url: str) -> str:
    """An address without its query: upload sessions carry secrets there."""
    return clean(re.sub(r"//[^/@\s]*@", "//***@", url.partition("?")[0]))


def words(error: BaseException) -> str:
    """Why a connection broke."""
    if isinstance(error, http.client.IncompleteRead):
        return "the answer broke off"
    return clean(str(error)) or type(error).__name__


def seconds(retry_after: str) -> float | None:
    """`Retry-After`, as a number of seconds or as a date."""
    if retry_after.isdecimal():
        return float(retry_after[:9])
    try:
        when = email.utils.parsedate_to_datetime(retry_after)
        return max(0.0, when.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
