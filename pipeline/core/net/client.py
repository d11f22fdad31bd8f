"""One client: requests with logins, redirects and proxies, bounded, and stoppable."""

from __future__ import annotations

import netrc
import os
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

import urllib3

from pipeline.core.errors import Interrupted
from pipeline.core.net.address import (
    next_address,
    origin_of,
    reason_of,
    shown_address,
    split_address,
)
from pipeline.core.net.answer import BREAKS, Answer
from pipeline.core.net.connections import Connections
from pipeline.core.net.failures import BadAddress, BadAnswer, BadHeader, BadProxy, Lost, Untrusted
from pipeline.core.net.route import Proxies
from pipeline.core.net.timing import HttpLimits

USER_AGENT = "sm120-pipeline"
REDIRECTS = (301, 302, 303, 307, 308)
# Answers that another try may turn: overload, limits, a gateway without its server.
MAY_PASS = (408, 425, 429, 500, 502, 503, 504)
# A thread that waits for a connection cannot be stopped; the process does not wait for it.
_LONGEST_GOODBYE_S = 3.0
# A name that does not resolve, and a machine on which nothing listens.
_UNREACHED = (socket.gaierror, ConnectionRefusedError)
# Ports that a step up from http to https does not change.
_DEFAULT = tuple((http, https) for http in (None, 80) for https in (None, 443))


class Body(Protocol):
    """Bytes to send; `pieces` can be called again when they must be sent again."""

    size_bytes: int

    def pieces(self) -> Iterator[bytes]: ...


class Small:
    """A body that fits into memory."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size_bytes = data, len(data)

    def pieces(self) -> Iterator[bytes]:
        yield self._data


@dataclass(frozen=True)
class Reply:
    """An answer that was read whole."""

    status: int
    url: str
    headers: Mapping[str, str]
    data: bytes

    def header(self, name: str) -> str:
        return self.headers.get(name) or ""


class Client:
    """Sends the requests of several threads; `hang_up` ends all of them."""

    def __init__(
        self,
        *,
        proxy: str | None = None,
        make_context: Callable[[], ssl.SSLContext] | None = None,
        limits: HttpLimits | None = None,
        use_netrc: bool = False,
    ) -> None:
        self.limits = limits or HttpLimits()
        self._connections = Connections(Proxies(proxy), make_context)
        self._use_netrc, self._answered = use_netrc, set[str]()

    @property
    def stop(self) -> threading.Event:
        return self._connections.stop

    def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        limits: HttpLimits | None = None,
    ) -> Answer:
        """Sends one request and reads the head of its answer; it does not follow redirects."""
        bounds = limits or self.limits
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **(headers or {})}
        if body is not None:
            sent["Content-Length"] = str(body.size_bytes)
        for name, value in sent.items():
            # the standard library would show the value in its error
            if not (value.isascii() and value.isprintable()):
                why = f"the {name} header contains characters that are not allowed"
                raise BadHeader(f"{shown_address(url)}: {why}")
        while True:
            try:
                pieces = body.pieces() if body else None
                raw = self._connections.send(method, url, sent, pieces, bounds)
                break
            except urllib3.exceptions.LocationValueError as error:
                raise BadAddress(f"{shown_address(url)!r} is not a valid address") from error
            except BREAKS as error:
                is_protocol = isinstance(error, urllib3.exceptions.ProtocolError)
                is_closed = is_protocol and any(isinstance(e, ConnectionError) for e in error.args)
                # Only a kept connection was closed: that is no answer to this request, so ask
                # again. What carries a body may have arrived, and its sender knows how to ask.
                may_ask = is_closed and body is None and not self.stop.is_set()
                if may_ask and self._connections.slot.is_kept:
                    continue
                if self.stop.is_set():
                    raise Interrupted("stopped") from error
                causes: list[BaseException] = [error]
                while inner := causes[-1].__cause__ or causes[-1].__context__:
                    causes.append(inner)
                for cause in causes:
                    if isinstance(cause, ssl.SSLCertVerificationError):
                        why = f"its certificate is not trusted: {cause.verify_message}"
                        raise Untrusted(f"{shown_address(url)}: {why}") from error
                is_proxys = isinstance(error, urllib3.exceptions.ProxyError)
                why = f"the proxy failed: {reason_of(error)}" if is_proxys else reason_of(error)
                # once a server has answered it may be restarting; before, its name may be wrong
                is_new = origin_of(url) not in self._answered
                raise Lost(
                    f"{shown_address(url)}: {why}",
                    is_stall=isinstance(error, TimeoutError | urllib3.exceptions.TimeoutError),
                    is_unreached=is_new and any(isinstance(e, _UNREACHED) for e in causes),
                ) from error
        self._answered.add(origin_of(url))
        return Answer(raw, method, url, self._connections, bounds)

    def follow(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, login: str = ""
    ) -> Answer:
        """Follows redirects to an answer; sends a login to the first origin and to no other."""
        current, login = url, login or login_in(url)
        for hop in range(self.limits.most_hops + 1):
            sent = dict(headers or {})
            header = login if is_home(url, current) else ""
            if not header and self._use_netrc:
                # as curl and pip send it; NETRC names another file
                host, named = split_address(current).hostname or "", os.environ.get("NETRC")
                with suppress(OSError, RuntimeError, netrc.NetrcParseError, UnicodeDecodeError):
                    known = netrc.netrc(Path(named or "~/.netrc").expanduser())
                    # its `default` is for hosts that we choose, not for those of a redirect
                    entry = known.hosts.get(host) if hop else known.authenticators(host)
                    header = basic(entry[0] or entry[1] or "", entry[2] or "") if entry else ""
            if header:
                sent["Authorization"] = header
            try:
                answer = self.ask(method, current, headers=sent)
                place = answer.header("Location")
                if answer.status not in REDIRECTS or not place:
                    return answer
                answer.drain()
                current = next_address(current, place)
            except (BadAddress, BadAnswer) as error:
                if isinstance(error, BadProxy) or (not hop and isinstance(error, BadAddress)):
                    raise
                raise BadAnswer(f"{shown_address(url)}: {error}") from error
        raise BadAnswer(f"{shown_address(url)}: redirects without end")

    def fetch(
        self, url: str, most_bytes: int, headers: Mapping[str, str] | None = None, login: str = ""
    ) -> Reply:
        """Fetches a small answer whole, whatever its status; the server may compress it."""
        sent = {"Accept-Encoding": "gzip", **(headers or {})}
        with self.follow("GET", url, headers=sent, login=login) as answer:
            data = answer.read(most_bytes)
            return Reply(answer.status, answer.url, answer.headers, data)

    def hang_up(self) -> None:
        """Stops every thread, also one that waits for a server's next bytes."""
        self._connections.hang_up()

    def join(self, threads: Sequence[threading.Thread]) -> bool:
        """Waits a little for threads that should stop; once all are gone, it can be used again."""
        deadline = time.monotonic() + _LONGEST_GOODBYE_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        all_gone = not any(thread.is_alive() for thread in threads)
        if all_gone:
            self.stop.clear()
        return all_gone


def basic(user: str, password: str) -> str:
    """The header's value for basic authentication."""
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()


def login_in(url: str) -> str:
    """The header that the user and password in an address make; empty where there are none."""
    parts = split_address(url)
    if "@" not in parts.netloc:
        return ""
    return basic(unquote(parts.username or ""), unquote(parts.password or ""))


def is_home(home: str, here: str) -> bool:
    """The same origin, or the same host after a step up from http to https."""
    first, now = split_address(home), split_address(here)
    steps_up = (first.scheme, now.scheme) == ("http", "https") and first.hostname == now.hostname
    return origin_of(home) == origin_of(here) or (steps_up and (first.port, now.port) in _DEFAULT)
