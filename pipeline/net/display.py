"""Addresses and servers' texts, fit for a terminal and without secrets."""

from __future__ import annotations

import re

_LOGIN = re.compile(r"(^|//)[^/\s]+@")


def masked(text: str) -> str:
    """An address, or a sentence with addresses in it, without user names and passwords."""
    return _LOGIN.sub(r"\1***@", text)


def clean(text: str) -> str:
    """A stranger's text without what would steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:2000]).split())[:200]


def shown(url: str) -> str:
    """An address without its query: upload sessions and signed links carry secrets there."""
    return clean(masked(url.partition("?")[0]))


def reason_of(error: BaseException) -> str:
    """The innermost cause in a few words, without logins."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return clean(masked(str(error))) or type(error).__name__
