"""Addresses as servers and people give them: read without surprises, shown without secrets."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urljoin, urlsplit

from pipeline.core.net.failures import BadAddress, BadAnswer

# In a sentence. A password may hold a slash that was not encoded: then what follows the colon is no
# port. The bound keeps long texts linear.
_LOGIN = re.compile(r"(^|//)(?:[^/\s]+|[^/\s:@\[]*:(?!\d*(?:/|\s|$))\S{0,300})@")
# In one address it may hold blanks, too; and where a question mark in it ends the address …
_ONE_LOGIN = re.compile(r"//[^/:@\[]*:(?!\d*(?:/|$)).{0,300}@", re.S)
# … its beginning stands where a port should.
_CUT_LOGIN = re.compile(r"//[^/:@\[]*:(?!\d*(?:/|$)).*", re.S)


def masked(text: str) -> str:
    """An address, or a sentence with addresses in it, without user names and passwords."""
    return _LOGIN.sub(r"\1***@", text)


def without_controls(text: str) -> str:
    """A server's text without what would control a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:2000]).split())[:200]


def shown_address(url: str) -> str:
    """An address without its query: upload sessions and signed links carry secrets there."""
    head = _ONE_LOGIN.sub("//***@", url.partition("?")[0])
    return without_controls(masked(_CUT_LOGIN.sub("//***", head)))


def reason_of(error: BaseException) -> str:
    """The innermost cause in brief, without logins."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return without_controls(masked(str(error))) or type(error).__name__


# Signed links of object stores may have some thousand characters.
_LONGEST = 16_384
_NUMBER = re.compile(r"[0-9]{1,18}")
_SPAN = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
# commas and angle brackets may stand in an address and in quotes
_LINK = re.compile(r'<([^<>]*)>((?:[^",<]|"(?:[^"\\]|\\.)*")*)')
_MARK = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;,"]*))')


def split_address(url: str) -> SplitResult:
    """The parts of an http or https address; `BadAddress` for everything else."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise BadAddress(f"{shown_address(url)!r} is not a valid address") from error
    is_clean = url.isprintable() and len(url) <= _LONGEST
    if parts.scheme not in ("http", "https") or not has_host or not is_clean:
        raise BadAddress(f"{shown_address(url)!r} is not a valid address")
    return parts


def origin_of(url: str) -> str:
    """Scheme, host and port: what a login may be sent to."""
    parts = split_address(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def next_address(here: str, location: str) -> str:
    """Where a server sends us: never with a login, never from https to another host's http."""
    try:
        url = urljoin(here, location)
        parts, home = split_address(url), split_address(here)
    except (ValueError, BadAddress) as error:
        where = shown_address(location)
        raise BadAnswer(f"redirects to {where!r}, which is not a valid address") from error
    if "@" in parts.netloc:
        raise BadAnswer(f"redirects to {shown_address(url)!r}, which is not a valid address")
    if parts.scheme == "https" or home.scheme == "http":
        return url
    if (parts.hostname or "").lower() == (home.hostname or "").lower():
        # behind a TLS proxy that does not say so, servers call themselves http
        return parts._replace(scheme="https", netloc=home.netloc.rpartition("@")[2]).geturl()
    raise BadAnswer(f"redirects from https to {shown_address(url)}")


def linked_page(header: str) -> str | None:
    """The address in a `Link` header that is marked as the next page (RFC 8288)."""
    for link in _LINK.finditer(header):
        for name, quoted, plain in _MARK.findall(link[2]):
            relations = (quoted or plain).strip("'").lower().split()
            if name.lower() == "rel" and "next" in relations:
                return link[1]
    return None


def goes_on(content_range: str, start: int, size_bytes: int) -> bool:
    """Whether a part of a file begins at our byte, ends within it, and is of a file of this size.

    It may end early: a server need not send all that it was asked for.
    """
    span = _SPAN.fullmatch(content_range.strip())
    if span is None or span[3] not in ("*", str(size_bytes)):
        return False
    return int(span[1]) == start <= int(span[2]) < size_bytes


def number_in(header: str) -> int | None:
    """A count in a header; none where it is none, or absurd."""
    return int(header) if _NUMBER.fullmatch(header) else None


def is_loopback(host_port: str) -> bool:
    """Whether a server is on this machine, where plain http does no harm."""
    is_bracketed = host_port.startswith("[")
    host = host_port[1:].partition("]")[0] if is_bracketed else host_port.partition(":")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
