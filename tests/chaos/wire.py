"""The wire between a command and a server: counted, and cut, bent or silent on request."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.testbed.packages import find_program
from tests.testbed.programs import run_program

HOSTS = Path("/etc/hosts")
_PIECE_BYTES = 1 << 14


class Wire:
    """A relay with a name and a port of its own, before a server on loopback."""

    def __init__(self, name: str, target: Callable[[], tuple[str, int]]) -> None:
        self.name, self._target = name, target
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        self.calm()
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{self.name}:{self.port}"

    def calm(self) -> None:
        """Everything passes, as it is; counting begins anew."""
        self.sent_bytes = 0  # of the server's answers
        self.lie_at: int | None = None
        self.cut_at: int | None = None
        self.has_struck = False

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target(), timeout=60)
            except OSError:
                client.close()
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._guard:
                self._open |= {client, server}
            for pair in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._relay, args=pair, daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                sink.sendall(self._bent(piece) if is_answer else piece)
        with self._guard:
            self._open -= {source, sink}
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _bent(self, piece: bytes) -> bytes:
        """An answer's next bytes; the one at `lie_at` has a wrong bit, `cut_at` ends all."""
        with self._guard:
            start, end = self.sent_bytes, self.sent_bytes + len(piece)
            self.sent_bytes = end
            lie, cut = self.lie_at, self.cut_at
        if lie is not None and start <= lie < end:
            self.has_struck, changed = True, bytearray(piece)
            changed[lie - start] ^= 1 << (lie % 8)
            piece = bytes(changed)
        if cut is not None and end > cut:
            threading.Thread(target=self.go_down, daemon=True).start()
            self.has_struck, self.cut_at = True, None
            piece = piece[: max(0, cut - start)]
        return piece

    def go_down(self) -> None:
        """The server is gone: connections end, and new ones are refused."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._guard:
            opened, self._open = self._open, set()
        for one in opened:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        """It is there again, at the same address."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = self._listen(self.port)


@contextmanager
def partitioned(*ports: int) -> Iterator[Callable[[], None]]:
    """No packet passes, neither to these ports nor from them; the call ends it."""
    rules = [("INPUT", "-p", "tcp", way, str(p)) for p in ports for way in ("--dport", "--sport")]
    for chain, *rest in rules:
        run_program("iptables", "-w", "-I", chain, *rest, "-j", "DROP")

    def heal() -> None:
        for chain, *rest in rules:
            command = [find_program("iptables"), "-w", "-D", chain, *rest, "-j", "DROP"]
            subprocess.run(command, capture_output=True, check=False)

    try:
        yield heal
    finally:
        heal()


def write_names(names: tuple[str, ...]) -> None:
    """What this namespace's /etc/hosts knows; names that it does not know nobody knows."""
    # in place: another file is mounted over the machine's own, which is not changed
    HOSTS.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {n}\n" for n in names))
