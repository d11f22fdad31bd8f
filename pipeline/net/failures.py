"""The four ways in which an exchange with a server fails."""

from __future__ import annotations


class NetError(Exception):
    """Something between this machine and a server; the message names the address."""


class Lost(NetError):
    """The exchange failed for now: another try may help, after `wait_s` if the server names it.

    `is_unreached`: no server answered at this address yet, so waiting seldom helps.
    """

    def __init__(
        self,
        why: str,
        *,
        wait_s: float | None = None,
        is_stall: bool = False,
        is_unreached: bool = False,
    ) -> None:
        super().__init__(why)
        self.wait_s, self.is_stall, self.is_unreached = wait_s, is_stall, is_unreached


class BadAnswer(NetError):
    """The answer cannot be right, nor will the next: too large, a redirect to nowhere."""


class BadAddress(NetError):
    """What was to be asked is not a valid address."""


class BadProxy(BadAddress):
    """What is configured as a proxy is none."""


class BadHeader(NetError):
    """A header, most likely a login, that cannot be sent; its value is never shown."""


class Untrusted(NetError):
    """The server's certificate, or the CA file that should judge it, is no good."""
