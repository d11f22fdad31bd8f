"""The sockets: a thread a connection, a limit on how many, and an end that leaves none behind."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline import log
from pipeline.errors import AddressUnusable
from pipeline.weights.serve.http import Answer, Closed, Reader, Refused, Request
from pipeline.weights.serve.send import Broken, send_bytes, send_part

MOST_CONNECTIONS = 512
_HANDSHAKE_S = 10.0
_LOG_CHARS = 300
_END_S = 2.0
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


@dataclass
class Server:
    """Listens, and hands each request to the one who answers."""

    answer: Callable[[Request], Answer]
    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    most: int = MOST_CONNECTIONS
    requests: int = 0
    sent_bytes: int = 0
    _open: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _log_lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        """Take the address; after this, clients can connect."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (self.host, self.port), family=family, backlog=256
            )
        except (OSError, OverflowError) as error:
            where = f"{self.host}:{self.port}"
            raise AddressUnusable(f"cannot listen on {where}: {error}") from error
        self.port = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()

    def run(self) -> None:
        """Accept until `stop` is called or the main thread is interrupted."""
        try:
            while not self._stopping.is_set():
                ready, _, _ = select.select([self._listener, self._woken], [], [])
                if self._listener in ready and not self._stopping.is_set():
                    self._accept()
        finally:
            self.close()

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopping.set()
        with suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """Let go of every socket."""
        self._stopping.set()
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for sock in left:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_S
        while self._open and time.monotonic() < deadline:
            time.sleep(0.01)

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:
            time.sleep(0.05)  # out of file descriptors: let some connections end
            return
        with self._lock:
            full = len(self._open) >= self.most
            if not full:
                self._open.add(sock)
        if full:
            with suppress(OSError):
                sock.settimeout(0.1)
                sock.send(_BUSY if self.tls is None else b"")
            sock.close()
            return
        try:
            threading.Thread(target=self._serve, args=(sock, str(peer[0])), daemon=True).start()
        except RuntimeError:  # the machine has no thread left: this client must come again
            self._forget(sock)

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_HANDSHAKE_S)
            if self.tls:
                sock = self._secured(sock, self.tls)
            self._talk(sock, peer)
            _linger(sock)
        except OSError:
            pass  # the client is gone, or speaks no TLS
        finally:
            self._forget(sock)

    def _secured(self, raw: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        sock = tls.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._open.discard(raw)
            self._open.add(sock)
        try:
            sock.do_handshake()
        except BaseException:
            self._forget(sock)
            raise
        return sock

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        sock.close()

    def _talk(self, sock: socket.socket, peer: str) -> None:
        reader = Reader(sock)
        stays = True
        while stays and not self._stopping.is_set():
            start = time.monotonic()
            try:
                request = reader.next()
                start = time.monotonic()
                answer, stays = self._answered(request), request.stays
            except Closed:
                return
            except Refused as refused:
                request, stays = Request("-", "-"), False
                words = str(refused).encode()
                answer = Answer(refused.status, {"X-Error-Message": str(refused)}, words)
            stays = self._send(sock, request, answer, stays) and stays
            self._log(peer, request, answer, time.monotonic() - start)

    def _answered(self, request: Request) -> Answer:
        try:
            return self.answer(request)
        except Exception as error:
            self._say(f"a defect: {type(error).__name__}: {error}")
            return Answer(500, {"X-Error-Message": "the server has a defect"})

    def _send(self, sock: socket.socket, request: Request, answer: Answer, stays: bool) -> bool:
        part = answer.part
        has_body = request.method != "HEAD" and answer.length > 0 and answer.status != 304
        try:
            head, sent = answer.head(stays=stays), 0
            if not has_body or part is None:
                send_bytes(sock, head + (answer.body if has_body else b""))
                sent = len(answer.body) if has_body else 0
            else:
                send_bytes(sock, head, more=True)
                sent = send_part(sock, part)
            with self._lock:
                self.requests += 1
                self.sent_bytes += sent
        except Broken as reason:
            self._say(f"broken off: {_plain(request.target)}: {reason}")
            return False
        finally:
            if part is not None:
                os.close(part.handle)
        return True

    def _log(self, peer: str, request: Request, answer: Answer, seconds: float) -> None:
        said = answer.headers.get("X-Error-Message", "")
        size = 0 if request.method == "HEAD" else answer.length
        line = f"{peer} {request.method} {_plain(request.target)} {answer.status} {size}"
        self._say(f"{line} {seconds:.3f}s{f' ({said})' if said else ''}")

    def _say(self, line: str) -> None:
        """A line is written in two pieces; threads must not mix them."""
        with self._log_lock:
            log.say(line)


def _linger(sock: socket.socket) -> None:
    """Let the last answer arrive: closing on unread bytes would take it back."""
    sock.shutdown(socket.SHUT_WR)
    deadline, left = time.monotonic() + 1, 1 << 20
    while left > 0 and (wait_s := deadline - time.monotonic()) > 0:
        sock.settimeout(wait_s)
        if not (n := len(sock.recv(1 << 16))):
            return
        left -= n


def _plain(target: str) -> str:
    """A target for the log: short, and without a query, in which some clients put secrets."""
    return target.partition("?")[0][:_LOG_CHARS]
