"""Addresses and servers' texts, fit for a terminal and without secrets."""

from __future__ import annotations

import re

# In a sentence. A password may hold a slash that nobody encoded: then what follows the colon is no
# port. The bound keeps long texts linear.
_LOGIN = re.compile(r"(^|//)(?:[^/\s]+|[^/\s:@\[]*:(?!\d*(?:/|\s|$))\S{0,300})@")
# In one address it may hold blanks, too; and where a question mark in it ends the address …
_ONE_LOGIN = re.compile(r"//[^/:@\[]*:(?!\d*(?:/|$)).{0,300}@", re.S)
# … its beginning stands where a port should.
_CUT_LOGIN = re.compile(r"//[^/:@\[]*:(?!\d*(?:/|$)).*", re.S)


def masked(text: str) -> str:
    """An address, or a sentence with addresses in it, without user names and passwords."""
    return _LOGIN.sub(r"\1***@", text)


def clean(text: str) -> str:
    """A stranger's text without what would steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:2000]).split())[:200]


def shown(url: str) -> str:
    """An address without its query: upload sessions and signed links carry secrets there."""
    head = _ONE_LOGIN.sub("//***@", url.partition("?")[0])
    return clean(masked(_CUT_LOGIN.sub("//***", head)))


def reason_of(error: BaseException) -> str:
    """The innermost cause in a few words, without logins."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return clean(masked(str(error))) or type(error).__name__
