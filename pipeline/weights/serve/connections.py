"""Who may be connected: a place is always left for a client that may read the files.

Anybody can open connections and stay silent. So clients that have not yet shown that they may read
(strangers) have their own, smaller limit, in all and for each address; a stranger more makes the
one go that has waited longest, and none of them can take the places of those who may read.
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

MOST_CONNECTIONS = 512
MOST_STRANGERS = 256
MOST_STRANGERS_OF_ONE = 32  # a stock client downloads over 8 connections at a time
_FEWEST = 8
_OWN_FILES = 64  # of the program itself: libraries, logs, files that are being proved
_WANTED_FILES = 2 * MOST_CONNECTIONS + MOST_STRANGERS + _OWN_FILES


@dataclass(eq=False)
class Connection:
    """One client's connection."""

    sock: socket.socket
    peer: str
    may_read: bool = False
    is_waiting: bool = True  # for a request to come, whole
    since: float = field(default_factory=time.monotonic)  # a stranger: since it came

    def wait(self) -> None:
        """The client's turn; a stranger grows no younger by asking again and again."""
        self.is_waiting = True
        if self.may_read:
            self.since = time.monotonic()

    def is_silent(self) -> bool:
        """Whether nothing has come that nobody has read yet."""
        look = select.poll()
        try:
            look.register(self.sock, select.POLLIN)
            return not look.poll(0)
        except (OSError, ValueError):  # it is being closed
            return True

    def hang_up(self) -> None:
        """From any thread: whoever reads or writes here finds the end."""
        with suppress(OSError):
            # not the SSL socket's own: for a moment that would write to the network in plain
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Connections:
    """All that are open, and the limits."""

    def __init__(
        self,
        most: int = MOST_CONNECTIONS,
        most_strangers: int = MOST_STRANGERS,
        most_strangers_of_one: int = MOST_STRANGERS_OF_ONE,
    ) -> None:
        self.most, self.most_strangers = most, most_strangers
        self.most_strangers_of_one = most_strangers_of_one
        self._open: set[Connection] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """A new client, a stranger yet; it may cost another stranger its place."""
        with self._lock:
            strangers = [c for c in self._open if not c.may_read]
            own = [c for c in strangers if c.peer == connection.peer]
            if len(own) >= self.most_strangers_of_one:
                # one whose request is here already is only waiting for us
                self._end_longest_waiting(c for c in own if c.is_silent())
            if len(strangers) >= self.most_strangers:
                counts = Counter(c.peer for c in strangers)
                peer = counts.most_common(1)[0][0]
                self._end_longest_waiting(c for c in strangers if c.peer == peer)
            self._open.add(connection)

    def let_read(self, connection: Connection, *, most_of_one: int | None = None) -> bool:
        """The client may read the files; False where all places for such are busy."""
        with self._lock:
            if connection.may_read:
                return True
            readers = [c for c in self._open if c.may_read]
            own = [c for c in readers if c.peer == connection.peer]
            full = readers if len(readers) >= self.most else []
            if most_of_one is not None and len(own) >= most_of_one:
                full = own
            if full and not self._end_longest_waiting(c for c in full if c.is_waiting):
                return False
            connection.may_read = True
            return True

    def make_room(self) -> None:
        """The machine is out of something: whoever waits longest goes, strangers first."""
        with self._lock:
            waiting = [c for c in self._open if c.is_waiting]
            strangers = [c for c in waiting if not c.may_read]
            self._end_longest_waiting(strangers or waiting)

    def forget(self, connection: Connection) -> None:
        """It is over."""
        with self._lock:
            self._open.discard(connection)
        connection.sock.close()

    def hang_up(self) -> None:
        """End all of them."""
        with self._lock:
            for connection in self._open:
                connection.hang_up()

    def _end_longest_waiting(self, connections: Iterable[Connection]) -> bool:
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
    return max(_FEWEST, min(MOST_CONNECTIONS, (soft - MOST_STRANGERS - _OWN_FILES) // 2))
