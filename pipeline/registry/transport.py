"""HTTP connections, a few for each thread, that can all be ended at once.

Plain `http.client`: an upload needs no more, starts in a tenth of a second less than with a
larger library, and its sockets are ours to close when someone presses Ctrl-C.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Protocol
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from pipeline.errors import Interrupted
from pipeline.registry.reference import is_loopback

CONNECT_TIMEOUT_S = 15.0
# a registry on slow storage is silent for minutes while it closes a layer of gigabytes
READ_TIMEOUT_S = 300.0
USER_AGENT = "sm120-pipeline"


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


def origin_of(url: str) -> str:
    """Scheme, host and port: what a login may be sent to."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


class Transport:
    """Connections by thread and origin."""

    def __init__(self, make_context: Callable[[], ssl.SSLContext]) -> None:
        self.stop = threading.Event()
        self._make_context = make_context
        self._context: ssl.SSLContext | None = None
        self._of_thread = threading.local()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._guard = threading.Lock()
        self._proxies = getproxies()

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | None = None
    ) -> http.client.HTTPResponse:
        """One request, one answer; whatever breaks is raised as it is."""
        origin, parts = origin_of(url), urlsplit(url)
        known = origin in self._connections
        try:
            return self._exchange(origin, parts, method, headers, body)
        except (http.client.BadStatusLine, BrokenPipeError, ConnectionResetError):
            self._forget(origin)
            # a kept connection that the server closed meanwhile says nothing about this request;
            # what carries a body may have arrived, and its sender knows how to ask
            if not known or self.stop.is_set() or body is not None:
                raise
            return self._exchange(origin, parts, method, headers, body)
        except BaseException:
            self._forget(origin)
            raise

    def _exchange(
        self,
        origin: str,
        parts: SplitResult,
        method: str,
        headers: Mapping[str, str],
        body: Body | None,
    ) -> http.client.HTTPResponse:
        connection = self._connection(origin, parts)
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        if self._proxy(parts) and parts.scheme == "http":
            target = f"http://{parts.netloc}{target}"
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in {"User-Agent": USER_AGENT, **headers}.items():
            connection.putheader(name, value)
        if body is not None or method in ("POST", "PUT", "PATCH"):
            connection.putheader("Content-Length", str(body.size_bytes if body else 0))
        connection.endheaders()
        try:
            for piece in body.pieces() if body else ():
                connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            # a server that refuses says so before it hangs up: hear it out
            with suppress(OSError, http.client.HTTPException):
                return connection.getresponse()
            raise
        return connection.getresponse()

    @property
    def _connections(self) -> dict[str, http.client.HTTPConnection]:
        if not hasattr(self._of_thread, "connections"):
            self._of_thread.connections = {}
        found: dict[str, http.client.HTTPConnection] = self._of_thread.connections
        return found

    def _connection(self, origin: str, parts: SplitResult) -> http.client.HTTPConnection:
        connection = self._connections.get(origin)
        if connection is not None and connection.sock is not None:
            return connection
        connection = self._new_connection(parts)
        connection.connect()
        connection.sock.settimeout(READ_TIMEOUT_S)
        with self._guard:
            self._sockets.add(connection.sock)
        if self.stop.is_set():
            connection.close()
            raise Interrupted("stopped")
        self._connections[origin] = connection
        return connection

    def _new_connection(self, parts: SplitResult) -> http.client.HTTPConnection:
        host, port, is_tls = parts.hostname or "", parts.port, parts.scheme == "https"
        proxy = self._proxy(parts)
        at_host, at_port = (proxy.hostname or "", proxy.port) if proxy else (host, port)
        if not is_tls:
            return http.client.HTTPConnection(at_host, at_port, timeout=CONNECT_TIMEOUT_S)
        with self._guard:
            # reading all CAs takes a while, and plain http needs none
            self._context = self._context or self._make_context()
        connection = http.client.HTTPSConnection(
            at_host, at_port, timeout=CONNECT_TIMEOUT_S, context=self._context
        )
        if proxy:
            connection.set_tunnel(host, port or 443)
        return connection

    def _proxy(self, parts: SplitResult) -> SplitResult | None:
        address = self._proxies.get(parts.scheme) or self._proxies.get("all")
        host = parts.hostname or ""
        if not address or is_loopback(host) or proxy_bypass(parts.netloc.rpartition("@")[2]):
            return None
        return urlsplit(address if "://" in address else f"http://{address}")

    def _forget(self, origin: str) -> None:
        connection = self._connections.pop(origin, None)
        if connection is not None:
            connection.close()

    def forget(self, url: str) -> None:
        """Close a connection whose answer was not read to its end."""
        self._forget(origin_of(url))

    def hang_up(self) -> None:
        """Stop every thread, also one that waits for a server's next bytes."""
        self.stop.set()
        with self._guard:
            sockets = list(self._sockets)
        for sock in sockets:
            with suppress(OSError, ValueError):
                # the plain socket's: a TLS socket's own would go on without encryption
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
