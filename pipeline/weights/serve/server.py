"""The sockets: a thread for each connection, a limit on how many, and an end that closes all."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline import log
from pipeline.errors import AddressUnusable
from pipeline.weights.serve.connections import ClientConnection, ConnectionLimits
from pipeline.weights.serve.http import Closed, Reader, Refused, Request, Response
from pipeline.weights.serve.send import Incomplete, send_bytes, send_part

_HANDSHAKE_S = 10.0  # as long as a request may take, see HEAD_S
_LOG_CHARS = 300  # of a target, which a client chooses
_END_S = 2.0  # for the threads of open connections when the server stops
_BUSY = Response(503, {"Retry-After": "5", "X-Error-Message": "all connections are in use"})


@dataclass
class Server:
    """Listens, and gives each request to `answer`."""

    answer: Callable[[Request], Response]
    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    may_read: Callable[[Request], bool] = lambda request: True
    most_of_one: int | None = None  # connections of one address; where no token is asked for
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    requests: int = 0
    sent_bytes: int = 0
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

    def run(self) -> None:
        """Accept until `stop` is called or the main thread is interrupted."""
        try:
            while not self._stopping.is_set():
                self._accept()
        finally:
            self.close()

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopping.set()
        with suppress(OSError):  # it is closed already
            # whoever waits in accept() gets an error; to close the socket would not wake them
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every socket."""
        self.stop()
        self._listener.close()
        self.connections.hang_up()
        deadline = time.monotonic() + _END_S
        while len(self.connections) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:  # out of file descriptors, or stopped
            self.connections.make_room()
            time.sleep(0.05)
            return
        connection = ClientConnection(sock, str(peer[0]))
        self.connections.add(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError:  # the machine has no thread left: this client must try again
            self.connections.forget(connection)

    def _serve(self, connection: ClientConnection) -> None:
        try:
            # heads of answers are small: they must not wait for a full packet
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.settimeout(_HANDSHAKE_S)
            if self.tls:
                raw = connection.sock
                connection.sock = self.tls.wrap_socket(
                    raw, server_side=True, do_handshake_on_connect=False
                )
                connection.sock.do_handshake()
            self._talk(connection)
            _linger(connection.sock)
        except OSError:
            pass  # the client is gone, or does not speak TLS
        finally:
            self.connections.forget(connection)

    def _talk(self, connection: ClientConnection) -> None:
        sock, peer = connection.sock, connection.peer
        reader = Reader(sock)
        stays = True
        while stays and not self._stopping.is_set():
            start = time.monotonic()
            connection.wait()
            try:
                request = reader.next(is_patient=connection.may_read)
                connection.is_waiting = False
                start = time.monotonic()
                if self.may_read(request) and not self._let_read(connection):
                    answer, stays = _BUSY, False
                else:
                    answer, stays = self._answered(request), request.stays
            except Closed:
                return
            except Refused as refused:
                request, stays = Request("-", "-"), False
                message = str(refused)
                answer = Response(refused.status, {"X-Error-Message": message}, message.encode())
            stays = self._send(sock, request, answer, stays) and stays
            self._log(peer, request, answer, time.monotonic() - start)

    def _let_read(self, connection: ClientConnection) -> bool:
        return self.connections.let_read(connection, most_of_one=self.most_of_one)

    def _answered(self, request: Request) -> Response:
        try:
            return self.answer(request)
        except Exception as error:
            self._say(f"internal error: {type(error).__name__}: {error}")
            return Response(500, {"X-Error-Message": "internal server error"})

    def _send(self, sock: socket.socket, request: Request, answer: Response, stays: bool) -> bool:
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
        except Incomplete as reason:
            self._say(f"incomplete: {_plain(request.target)}: {reason}")
            return False
        finally:
            if part is not None:
                os.close(part.handle)
        return True

    def _log(self, peer: str, request: Request, answer: Response, seconds: float) -> None:
        message = answer.headers.get("X-Error-Message", "")
        size = 0 if request.method == "HEAD" else answer.length
        line = f"{peer} {request.method} {_plain(request.target)} {answer.status} {size}"
        self._say(f"{line} {seconds:.3f}s{f' ({message})' if message else ''}")

    def _say(self, line: str) -> None:
        """A line is written in two pieces; those of two threads must not mix."""
        with self._log_lock:
            log.say(line)


def _linger(sock: socket.socket) -> None:
    """Let the last answer arrive: closing with unread bytes sends a reset, which discards it."""
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
