"""How an exchange with a server fails."""

from __future__ import annotations

from dataclasses import dataclass, field


class NetError(Exception):
    """Something between this machine and a server; the message names the address."""


@dataclass(eq=False)
class Lost(NetError):
    """The exchange failed for now: another try may help, after `wait_s` if the server names it."""

    why: str
    wait_s: float | None = field(default=None, kw_only=True)
    is_stall: bool = field(default=False, kw_only=True)
    # no server answered at this address yet, so waiting seldom helps
    is_unreached: bool = field(default=False, kw_only=True)


class BadAnswer(NetError):
    """The answer cannot be right, nor will the next: too large, a redirect to nowhere."""


class BadAddress(NetError):
    """The address to ask is not valid."""


class BadProxy(BadAddress):
    """The configured proxy is not valid."""


class BadHeader(NetError):
    """A header, most likely a login, that cannot be sent; its value is never shown."""


class Untrusted(NetError):
    """The server's certificate, or the CA file that should judge it, is no good."""
