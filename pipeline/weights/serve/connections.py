"""Limits on connections: one is always left for a client that may read the files.

Anybody can open connections and send nothing. So clients that have not yet shown that they may
read (unknown clients) have their own, smaller limit, in all and for each address. One more closes
the one that has waited longest; none of them can take the connections of those who may read.
"""

from __future__ import annotations

import resource
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

MOST_CONNECTIONS = 512  # 64 neighbours with the 8 connections of a stock client
MOST_UNKNOWN = 256
MOST_UNKNOWN_OF_ONE = 32  # a stock client downloads over 8 connections at a time
_FEWEST = 8  # one stock client, whatever the limit of open files
_OWN_FILES = 64  # of the program itself: libraries, logs, files that are being proved
_WANTED_FILES = 2 * MOST_CONNECTIONS + MOST_UNKNOWN + _OWN_FILES


@dataclass(eq=False)
class ClientConnection:
    """One client's connection."""

    sock: socket.socket
    peer: str
    may_read: bool = False
    is_waiting: bool = True  # for a request to come, whole
    since: float = field(default_factory=time.monotonic)  # an unknown client: since it connected

    def wait(self) -> None:
        """The client's turn; an unknown client gains no time by asking again and again."""
        self.is_waiting = True
        if self.may_read:
            self.since = time.monotonic()

    def is_silent(self) -> bool:
        """Whether no bytes are waiting to be read."""
        waiting = select.poll()
        try:
            waiting.register(self.sock, select.POLLIN)
            return not waiting.poll(0)
        except (OSError, ValueError):  # it is being closed
            return True

    def hang_up(self) -> None:
        """From any thread: whoever reads or writes here gets an end of file."""
        with suppress(OSError):
            # not the SSL socket's own: for a moment that would write to the network in plain
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class ConnectionLimits:
    """All that are open, and the limits."""

    def __init__(
        self,
        most: int = MOST_CONNECTIONS,
        most_unknown: int = MOST_UNKNOWN,
        most_unknown_of_one: int = MOST_UNKNOWN_OF_ONE,
    ) -> None:
        self.most, self.most_unknown = most, most_unknown
        self.most_unknown_of_one = most_unknown_of_one
        self._open: set[ClientConnection] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: ClientConnection) -> None:
        """A new client, unknown yet; it may cost another unknown one its connection."""
        with self._lock:
            unknown = [c for c in self._open if not c.may_read]
            own = [c for c in unknown if c.peer == connection.peer]
            if len(own) >= self.most_unknown_of_one:
                # one whose request has arrived is only waiting for us
                self._close_longest_waiting(c for c in own if c.is_silent())
            if len(unknown) >= self.most_unknown:
                counts = Counter(c.peer for c in unknown)
                peer = counts.most_common(1)[0][0]
                self._close_longest_waiting(c for c in unknown if c.peer == peer)
            self._open.add(connection)

    def let_read(self, connection: ClientConnection, *, most_of_one: int | None = None) -> bool:
        """The client may read the files; False where all connections for such are busy."""
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
            unknown = [c for c in waiting if not c.may_read]
            self._close_longest_waiting(unknown or waiting)

    def forget(self, connection: ClientConnection) -> None:
        """It is over."""
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
    """As many clients as this process may have files open for: each takes a socket and a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _WANTED_FILES:
        wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(_FEWEST, min(MOST_CONNECTIONS, (soft - MOST_UNKNOWN - _OWN_FILES) // 2))
