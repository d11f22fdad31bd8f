"""Sending a part of a file from the page cache to the network, without a copy through Python."""

from __future__ import annotations

import os
import select
import socket
import ssl
import time

from pipeline.weights.disk.proof import identity
from pipeline.weights.serve.http import FilePart

STALL_S = 60.0  # a client must take at least _LEAST_BYTES in this time
_LEAST_BYTES = 64 << 10
_ONCE_BYTES = 8 << 20  # in one sendfile call; the file is checked again between two
_COPY_BYTES = 256 << 10  # TLS encrypts in Python, so bytes are copied in small pieces
_TAIL_BYTES = 64 << 10  # held back until the file has proved unchanged


class Incomplete(Exception):
    """The answer could not be sent whole; the connection cannot be used any more."""


def send_bytes(sock: socket.socket, data: bytes, *, more: bool = False) -> None:
    """A whole answer or its head; `more` lets the head leave in one packet with what follows."""
    try:
        sock.settimeout(STALL_S)
        if more and not isinstance(sock, ssl.SSLSocket):
            sent = sock.send(data, socket.MSG_MORE)
            data = data[sent:]
        if data:
            sock.sendall(data)
    except OSError as error:
        raise Incomplete(str(error)) from None


def send_part(sock: socket.socket, part: FilePart) -> int:
    """All bytes of a part, the last ones only if the file is still the proved one by then.

    A client that gets too few bytes discards them or asks again. What is written to a file after
    its last bytes were taken may still change pages that are being sent: no server that does not
    copy can rule that out, and our own fetch hashes what arrives.
    """
    clock, sent = _Clock(), 0
    tail = min(part.length, _TAIL_BYTES)
    try:
        while sent < part.length - tail:
            _check(part)
            want = min(part.length - tail - sent, _ONCE_BYTES)
            sent += _send_some(sock, part.handle, part.start + sent, want, clock)
            clock.moved(sent)
        # copied, so that what is sent is what was in the file at the check that follows
        last = os.pread(part.handle, tail, part.start + sent)
        _check(part)
        if len(last) != tail:
            raise Incomplete("the file became shorter while it was sent")
        send_bytes(sock, last)
    except OSError as error:
        raise Incomplete(str(error)) from None
    return part.length


def _check(part: FilePart) -> None:
    if identity(part.handle) != part.seen:
        raise Incomplete("the file changed while it was sent")


def _send_some(sock: socket.socket, handle: int, offset: int, want: int, clock: _Clock) -> int:
    if isinstance(sock, ssl.SSLSocket):
        data = os.pread(handle, min(want, _COPY_BYTES), offset)
        sock.settimeout(clock.left_s)
        sock.sendall(data)
        count = len(data)
    else:
        count = _sendfile(sock, handle, offset, want, clock)
    if not count:
        raise Incomplete("the file became shorter while it was sent")
    return count


def _sendfile(sock: socket.socket, handle: int, offset: int, want: int, clock: _Clock) -> int:
    while True:
        try:
            return os.sendfile(sock.fileno(), handle, offset, want)
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(sock, select.POLLOUT)
            if not waiting.poll(clock.left_s * 1000):
                raise Incomplete("the client does not read") from None


class _Clock:
    """Gives up on a client that reads so slowly that it only blocks the connection."""

    def __init__(self) -> None:
        self._mark, self._sent = time.monotonic() + STALL_S, 0

    @property
    def left_s(self) -> float:
        left = self._mark - time.monotonic()
        if left <= 0:
            raise Incomplete("the client does not read")
        return left

    def moved(self, sent: int) -> None:
        if sent - self._sent >= _LEAST_BYTES:
            self._mark, self._sent = time.monotonic() + STALL_S, sent
