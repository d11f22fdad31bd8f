"""The sockets: one thread per connection, limits on how many, and a stop that closes all.

Anybody can open connections and send nothing. So clients that have not yet shown that they may
read (unknown clients) have their own, smaller limit, in all and for each address. One more closes
the one that has waited longest; none of them can take the connections of those who may read.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.core import log
from pipeline.core.errors import AddressUnusable
from pipeline.weights.serve import http

MOST_CONNECTIONS = 512  # 64 neighbours with the 8 connections of a stock client
MOST_UNKNOWN = 256
MOST_UNKNOWN_OF_ONE = 32  # a stock client downloads over 8 connections at a time
_FEWEST = 8  # one stock client, whatever the limit of open files
_OWN_FILES = 64  # of the program itself: libraries, logs, files that are being proved
_WANTED_FILES = 2 * MOST_CONNECTIONS + MOST_UNKNOWN + _OWN_FILES
_HANDSHAKE_S = 10.0  # as long as a request may take, see HEAD_S
_LOG_CHARS = 300  # of a target, which a client chooses
_END_S = 2.0  # for the threads of open connections when the server stops
_BUSY = http.Response(503, {"Retry-After": "5", "X-Error-Message": "all connections are in use"})


@dataclass(eq=False)
class ClientConnection:
    """One client's connection."""

    sock: socket.socket
    peer: str
    may_read: bool = False
    is_waiting: bool = True  # for a request to come, whole
    since: float = field(default_factory=time.monotonic)  # an unknown client: since it connected

    def hang_up(self) -> None:
        """End it from any thread: whoever reads or writes on it gets an end of file."""
        with suppress(OSError):
            # not the SSL socket's own: for a moment that would write to the network in plain
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


@dataclass
class ConnectionLimits:
    """All open connections, and the limits."""

    most: int = MOST_CONNECTIONS
    most_unknown: int = MOST_UNKNOWN
    most_unknown_of_one: int = MOST_UNKNOWN_OF_ONE
    _open: set[ClientConnection] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: ClientConnection) -> None:
        """Add a new, unknown client; it may cost another unknown one its connection."""
        with self._lock:
            unknown = [c for c in self._open if not c.may_read]
            own = [c for c in unknown if c.peer == connection.peer]
            if len(own) >= self.most_unknown_of_one:
                waiting = select.poll()
                for each in own:
                    with suppress(OSError, ValueError):  # it is being closed
                        waiting.register(each.sock, select.POLLIN)
                # one whose request has arrived is only waiting for us
                arrived = {handle for handle, _ in waiting.poll(0)}
                self._close_longest_waiting(c for c in own if c.sock.fileno() not in arrived)
            if len(unknown) >= self.most_unknown:
                peer = Counter(c.peer for c in unknown).most_common(1)[0][0]
                self._close_longest_waiting(c for c in unknown if c.peer == peer)
            self._open.add(connection)

    def let_read(self, connection: ClientConnection, most_of_one: int | None) -> bool:
        """Let a client read the files; False if all connections for readers are busy."""
        with self._lock:
            if connection.may_read:
                return True
            readers = [c for c in self._open if c.may_read]
            own = [c for c in readers if c.peer == connection.peer]
            full = readers if len(readers) >= self.most else []
            if most_of_one is not None and len(own) >= most_of_one:
                full = own
            if full and not self._close_longest_waiting(c for c in full if c.is_waiting):
                return False
            connection.may_read = True
            return True

    def make_room(self) -> None:
        """The machine is out of files: close what waits longest, unknown clients first."""
        with self._lock:
            waiting = [c for c in self._open if c.is_waiting]
            self._close_longest_waiting([c for c in waiting if not c.may_read] or waiting)

    def forget(self, connection: ClientConnection) -> None:
        """Close a connection that is over."""
        with self._lock:
            self._open.discard(connection)
        connection.sock.close()

    def hang_up(self) -> None:
        """End all of them."""
        with self._lock:
            for connection in self._open:
                connection.hang_up()

    def _close_longest_waiting(self, connections: Iterable[ClientConnection]) -> bool:
        oldest = min(connections, key=lambda c: c.since, default=None)
        if oldest is None:
            return False
        self._open.discard(oldest)
        oldest.hang_up()
        return True


def most_connections() -> int:
    """Count the clients that this process has files for: each takes a socket and a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _WANTED_FILES:
        wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(_FEWEST, min(MOST_CONNECTIONS, (soft - MOST_UNKNOWN - _OWN_FILES) // 2))


@dataclass
class HubServer:
    """Listens, and gives each request to `answer`."""

    answer: Callable[[http.Request], http.Response]
    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    may_read: Callable[[http.Request], bool] = lambda request: True
    most_of_one: int | None = None  # connections of one address, if no token is needed
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    is_quiet: bool = False  # beside a fetch: no line for each request
    requests: int = 0
    sent_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        """Take the address; after this, clients can connect."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        where = (self.host, self.port)
        try:
            self._listener = socket.create_server(where, family=family, backlog=256)
        except (OSError, OverflowError) as error:
            message = f"cannot listen on {self.host}:{self.port}: {error}"
            raise AddressUnusable(message) from error
        self.port = self._listener.getsockname()[1]

    def run(self) -> None:
        """Accept until `stop` is called or the main thread is interrupted."""
        try:
            while not self._stopping.is_set():
                try:
                    sock, peer = self._listener.accept()
                except OSError:  # out of file descriptors, or stopped
                    self.connections.make_room()
                    time.sleep(0.05)
                    continue
                connection = ClientConnection(sock, str(peer[0]))
                self.connections.add(connection)
                try:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                except RuntimeError:  # the machine has no thread left: this client must try again
                    self.connections.forget(connection)
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

    def _serve(self, connection: ClientConnection) -> None:
        try:
            # heads of answers are small: they must not wait for a full packet
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.settimeout(_HANDSHAKE_S)
            if self.tls:
                connection.sock = self.tls.wrap_socket(
                    connection.sock, server_side=True, do_handshake_on_connect=False
                )
                connection.sock.do_handshake()
            reader, stays = http.Reader(connection.sock), True
            while stays and not self._stopping.is_set():
                start, request, stays = time.monotonic(), http.Request("-", "-"), False
                connection.is_waiting = True
                # an unknown client gains no time by asking again and again
                if connection.may_read:
                    connection.since = start
                try:
                    request = reader.next(is_patient=connection.may_read)
                    connection.is_waiting, start, stays = False, time.monotonic(), request.stays
                    if self.may_read(request) and not self.connections.let_read(
                        connection, self.most_of_one
                    ):
                        answer, stays = _BUSY, False
                    else:
                        answer = self.answer(request)
                except http.Closed:
                    break
                except http.RequestError as refused:
                    why = str(refused)
                    answer = http.Response(refused.status, {"X-Error-Message": why}, why.encode())
                except Exception as error:
                    self._say(f"internal error: {type(error).__name__}: {error}")
                    answer = http.Response(500, {"X-Error-Message": "internal server error"})
                stays = self._send(connection.sock, request, answer, stays) and stays
                message = answer.headers.get("X-Error-Message", "")
                size = 0 if request.method == "HEAD" else answer.length
                asked = f"{connection.peer} {request.method} {_plain(request.target)}"
                gave = f"{answer.status} {size} {time.monotonic() - start:.3f}s"
                self._say(f"{asked} {gave}{f' ({message})' if message else ''}")
            # let the last answer arrive: closing with unread bytes sends a reset, which discards it
            connection.sock.shutdown(socket.SHUT_WR)
            deadline, most_bytes = time.monotonic() + 1, 1 << 20
            while most_bytes > 0 and (wait_s := deadline - time.monotonic()) > 0:
                connection.sock.settimeout(wait_s)
                if not (count := len(connection.sock.recv(1 << 16))):
                    break
                most_bytes -= count
        except OSError:
            pass  # the client is gone, or does not speak TLS
        finally:
            self.connections.forget(connection)

    def _send(
        self, sock: socket.socket, request: http.Request, answer: http.Response, stays: bool
    ) -> bool:
        part, head = answer.part, answer.head(stays=stays)
        has_body = request.method != "HEAD" and answer.length > 0 and answer.status != 304
        try:
            if part is not None and has_body:
                http.send_bytes(sock, head, more=True)
                http.send_part(sock, part)
            else:
                http.send_bytes(sock, head + (answer.body if has_body else b""))
            with self._lock:
                self.requests += 1
                self.sent_bytes += answer.length if has_body else 0
        except http.Incomplete as reason:
            self._say(f"incomplete: {_plain(request.target)}: {reason}")
            return False
        finally:
            if part is not None:
                os.close(part.handle)
        return True

    def _say(self, line: str) -> None:
        """Log a line in one go: its two pieces must not mix with another thread's."""
        with self._lock:
            if not self.is_quiet:
                log.say(line)


def _plain(target: str) -> str:
    """Shorten a target for the log, and drop the query, where some clients put secrets."""
    return target.partition("?")[0][:_LOG_CHARS]
