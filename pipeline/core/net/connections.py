"""Keeps connections, finds their proxy, and can end all of them at once."""

from __future__ import annotations

import http
import http.client
import io
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from pipeline.core.errors import Interrupted
from pipeline.core.net.address import split_address
from pipeline.core.net.route import Proxies, Proxy, tls_context
from pipeline.core.net.timing import HttpLimits, Watchdog

# More than the threads of any command: a connection beyond that would be closed after one use.
_KEPT_A_SERVER = 32
_SERVERS = 32
_MOST_LINE_BYTES = 1 << 16


@dataclass
class Slot:
    """The socket that a thread uses at the moment."""

    sock: socket.socket | None = None
    limits: HttpLimits = field(default_factory=HttpLimits)
    is_kept: bool = False  # the connection was there from an earlier request


class Connections:
    """Pools by scheme and proxy; safe for several threads."""

    def __init__(
        self, proxies: Proxies, make_context: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        self.stop, self.watch = threading.Event(), Watchdog()
        self._proxies, self._make_context = proxies, make_context or tls_context
        self._context: ssl.SSLContext | None = None
        self._managers: dict[tuple[str, Proxy | None], urllib3.PoolManager] = {}
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._of_thread = threading.local()
        self._guard = threading.Lock()

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Iterable[bytes] | None,
        limits: HttpLimits,
    ) -> urllib3.BaseHTTPResponse:
        """Sends one request and reads the head of its answer; raises whatever breaks as it is."""
        if self.stop.is_set():
            raise Interrupted("stopped")
        parts = split_address(url)
        scheme, proxy = parts.scheme, self._proxies.of(parts)
        with self._guard:
            manager = self._managers.get((scheme, proxy))
            if manager is None:
                extra: dict[str, Any] = {"num_pools": _SERVERS, "maxsize": _KEPT_A_SERVER}
                if scheme == "https" or (proxy and proxy.url.startswith("https:")):
                    # reading all CAs takes a while, and plain http needs none
                    self._context = self._context or self._make_context()
                if scheme == "https":
                    extra["ssl_context"] = self._context
                if proxy:
                    extra |= {"proxy_url": proxy.url, "proxy_headers": proxy.headers}
                    extra["proxy_ssl_context"] = self._context
                manager = (urllib3.ProxyManager if proxy else urllib3.PoolManager)(**extra)
                # Pools whose connections tell us of their sockets. They know us only weakly: with
                # the last use of a client its connections close.
                me = weakref.ref(self)
                pools: dict[str, Any] = {
                    "http": partial(_new_pool, HTTPConnectionPool, partial(_Plain, me)),
                    "https": partial(_new_pool, HTTPSConnectionPool, partial(_Secure, me)),
                }
                manager.pool_classes_by_scheme = pools
                self._managers[scheme, proxy] = manager
        self.slot.sock, self.slot.limits = None, limits
        return manager.urlopen(
            method,
            # the login of an address travels as a header
            parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
            body=body,
            headers=dict(headers),
            timeout=urllib3.Timeout(connect=limits.connect_s, read=limits.silence_s),
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )

    def note(self, sock: socket.socket) -> None:
        """Notes the socket that a thread uses from now on; after a stop, ends it."""
        with self._guard:
            self._sockets.add(sock)
        self.slot.sock = sock
        if self.stop.is_set():
            end_socket(sock)
            raise Interrupted("stopped")

    @property
    def slot(self) -> Slot:
        """The calling thread's own slot; other threads may cut its socket."""
        if not hasattr(self._of_thread, "slot"):
            self._of_thread.slot = Slot()
        slot: Slot = self._of_thread.slot
        return slot

    @contextmanager
    def in_time(self, most_s: float, what: str) -> Iterator[None]:
        """Cuts the calling thread's exchange if the block takes longer."""
        slot = self.slot
        self.watch.begin(id(slot), lambda: end_socket(slot.sock), most_s)
        try:
            yield
        finally:
            if not self.watch.end(id(slot)) and not self.stop.is_set():
                raise TimeoutError(f"no {what} in {most_s:g} s") from None

    def hang_up(self) -> None:
        """Stops every thread, also one that waits for a server's next bytes."""
        self.stop.set()
        with self._guard:
            sockets = list(self._sockets)
        for sock in sockets:
            end_socket(sock)


def end_socket(sock: socket.socket | None) -> None:
    """Ends a connection: its reader and its writer stop at once."""
    # no socket: nothing is connected yet, or it is TLS within TLS
    with suppress(OSError, ValueError, TypeError):
        # the plain socket's: a TLS socket's own would go on without encryption
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # type: ignore[arg-type]


def _new_pool(kind: Any, new_connection: Any, host: str, port: int, **settings: Any) -> Any:
    pool = kind(host, port, **settings)
    pool.ConnectionCls = new_connection
    return pool


class _LastLine:
    """A file that remembers the last line that was read from it."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.file, self.last = file, b"?"

    def readline(self, *limits: int) -> bytes:
        self.last = self.file.readline(*limits)
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Final(http.client.HTTPResponse):
    """An answer that is no interim one, and whose head is whole.

    The standard library passes over 100 only. It would take a 103 for the answer, and the answer
    for that of the next request on the same connection. It also takes a connection that ends among
    the headers for their end, and what has no length then for an empty body.
    """

    def begin(self) -> None:
        lines = _LastLine(self.fp)
        self.fp = cast(io.BufferedReader, lines)
        super().begin()
        # without a body the answer is closed already
        self.fp = lines.file if cast(Any, self.fp) is lines else self.fp
        if lines.last == b"":
            raise http.client.RemoteDisconnected("the connection ended among the headers")

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if status == http.HTTPStatus.SWITCHING_PROTOCOLS:
                raise http.client.HTTPException("the server switches to another protocol")
            if not http.HTTPStatus.CONTINUE < status < http.HTTPStatus.OK:
                return version, status, reason
            while self.fp.readline(_MOST_LINE_BYTES) not in (b"\r\n", b"\n", b""):
                pass


class _Noted:
    """A connection whose socket its owner knows while it connects, asks and listens."""

    response_class: Any = _Final
    sock: Any
    timeout: Any

    def __init__(self, owner: weakref.ref[Connections], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner_ref = owner

    @property
    def _owner(self) -> Connections:
        owner = self._owner_ref()
        if owner is None:
            raise Interrupted("stopped")
        return owner

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc]
        # another handle on it, as TLS takes the first away: a handshake that drips is cut, too
        self._owner.note(sock.dup())
        return sock

    def connect(self) -> None:
        # a proxy may answer for ever to CONNECT
        with self._owner.in_time(2 * self._owner.slot.limits.connect_s, "connection"):
            super().connect()  # type: ignore[misc]
        self._owner.note(self.sock)
        # urllib3 would send with the limit for connecting; a server may read its disk full first
        self.sock.settimeout(self._owner.slot.limits.silence_s)

    def request(self, *args: Any, **kwargs: Any) -> None:
        self._owner.slot.is_kept = self.sock is not None
        if self.sock is not None:
            self._owner.note(self.sock)
            self.timeout = self._owner.slot.limits.silence_s
        super().request(*args, **kwargs)  # type: ignore[misc]

    def getresponse(self) -> Any:
        with self._owner.in_time(self._owner.slot.limits.head_s, "whole answer"):
            return super().getresponse()  # type: ignore[misc]


class _Plain(_Noted, HTTPConnection):
    pass


class _Secure(_Noted, HTTPSConnection):
    pass
