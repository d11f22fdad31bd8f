"""HTTP/1.1 as far as a read-only file server needs it, strict in what it accepts.

The standard library's http.server passes 10 of the 14 malformed requests that the tests list on to
its handler as good ones (doubled lengths, folded headers, bare newlines …) and has no deadline for
a whole request, so this module reads requests itself.
"""

from __future__ import annotations

import os
import re
import select
import socket
import ssl
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes

from pipeline.core.foreign_json import read_json
from pipeline.weights.disk.hashing import Identity, identity_of

HEAD_BYTES = 16 << 10  # the Hub's client sends less than 1 kB
BODY_BYTES = 1 << 20  # of a `paths-info` question; the only requests with a body
HEAD_S = 10.0  # a request must be here, whole, this long after its first byte
IDLE_S = 60.0  # between two requests
STALL_S = 60.0  # a client must take at least _LEAST_BYTES in this time
_LEAST_BYTES = 64 << 10
_ONCE_BYTES = 8 << 20  # in one sendfile call; the file is checked again between two
_COPY_BYTES = 256 << 10  # TLS encrypts in Python, so bytes are copied in small pieces
_TAIL_BYTES = 64 << 10  # held back until the file has proved unchanged

_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
# Given twice, these would be read differently by us and by a proxy before us.
_ONCE = {"host", "content-length", "authorization", "range", "if-range", "content-type"}

Query = dict[str, list[str]]


class RequestError(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, message: str, extra: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.extra = status, extra or {}


class Closed(Exception):
    """The client closed the connection, or sent nothing for too long between two requests."""


class Incomplete(Exception):
    """The answer could not be sent whole; the connection is no longer usable."""


@dataclass(frozen=True)
class Request:
    """One request, whole."""

    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    stays: bool = True  # whether the client wants to ask more

    def header(self, name: str) -> str:
        return self.headers.get(name, "")

    @property
    def path(self) -> str:
        """The target without its query, and without scheme and host, which proxies' clients add."""
        return re.sub(r"^https?://[^/?#]*", "", self.target, flags=re.I).partition("?")[0]

    def split(self) -> tuple[list[str], Query]:
        """The parts of the path, each decoded by itself, and the query."""
        if not self.path.startswith("/"):
            raise RequestError(400, "the target is not a path")
        try:
            # decoded after splitting: an encoded slash belongs to a name (refs%2Fpr%2F1)
            parts = [unquote_to_bytes(part).decode() for part in self.path[1:].split("/")]
            # a bound on the fields, for parse_qs takes its time with thousands of them
            text = self.target.partition("?")[2]
            return parts, parse_qs(text, max_num_fields=50, errors="strict")
        except ValueError:
            raise RequestError(400, "the target is not UTF-8") from None

    def asked_paths(self) -> list[str]:
        """The paths of a question, as a form (the Hub's client) or as JSON (others)."""
        try:
            if "json" in self.header("content-type"):
                paths: Any = read_json(self.body, most_bytes=len(self.body)).get("paths", [])
            else:
                paths = parse_qs(self.body.decode(), max_num_fields=20_000).get("paths", [])
        except (ValueError, AttributeError):
            raise RequestError(400, "the body is neither a form nor JSON") from None
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise RequestError(400, "paths must be a list of names")
        return paths


def is_switched_on(query: Query, name: str) -> bool:
    """Whether a switch is on, as Python and JavaScript clients spell it."""
    return query.get(name, [""])[0].lower() in ("true", "1")


def number(query: Query, name: str, default: int) -> int:
    """A number of the query."""
    text = query.get(name, [""])[0]
    if text and not re.fullmatch(r"[0-9]{1,9}", text):
        raise RequestError(400, f"{name} is not a number")
    return int(text) if text else default


@dataclass(frozen=True)
class FilePart:
    """A range of an open file that must still be the proved one when its last bytes leave."""

    handle: int
    start: int
    length: int
    seen: Identity | None  # none of a file that is still being fetched, and grows elsewhere

    def require_unchanged(self) -> None:
        if self.seen is not None and identity_of(os.fstat(self.handle)) != self.seen:
            raise Incomplete("the file changed while it was sent")


@dataclass(frozen=True)
class Response:
    """A status, headers, and either bytes or a part of an open file."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    part: FilePart | None = None

    @property
    def length(self) -> int:
        return self.part.length if self.part else len(self.body)

    def head(self, *, stays: bool) -> bytes:
        """The status line and headers."""
        rows = {
            "Date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
            **({} if self.status == 304 else {"Content-Length": str(self.length)}),
            "Connection": "keep-alive" if stays else "close",
            "X-Content-Type-Options": "nosniff",
            **self.headers,
        }
        # a line end in a value would begin a header of its own
        plain = {n: "".join(c if c.isprintable() else "?" for c in v) for n, v in rows.items()}
        line = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
        text = "".join(f"{name}: {value}\r\n" for name, value in plain.items())
        return f"{line}{text}\r\n".encode("latin-1", "replace")


class Reader:
    """Takes requests off a connection, each within its limits of size and time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer = sock, b""

    def next(self, *, is_patient: bool = False) -> Request:
        """Read the next request; raise Closed at the end, RequestError for anything else.

        A new client must send its request soon; only one that may read can stay idle.
        """
        deadline = time.monotonic() + HEAD_S
        if not self._buffer:
            self._receive(time.monotonic() + (IDLE_S if is_patient else HEAD_S), begun=False)
            deadline = time.monotonic() + HEAD_S
        while b"\r\n\r\n" not in self._buffer and len(self._buffer) <= HEAD_BYTES:
            self._receive(deadline, begun=True)
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        if len(head) > HEAD_BYTES:
            raise RequestError(431, "the headers are too long")
        first, *lines = head.split(b"\r\n")
        match = _LINE.fullmatch(first)
        if not match:
            raise RequestError(400, "this is not an HTTP/1.1 request")
        if len(lines) > 100:
            raise RequestError(431, "there are too many headers")
        headers: dict[str, str] = {}
        for line in lines:
            row = _FIELD.fullmatch(line)
            if not row:
                raise RequestError(400, "a header is malformed")
            name, value = row[1].decode().lower(), row[2].decode("latin-1").strip()
            if name in headers and name in _ONCE:
                raise RequestError(400, f"{name} is given twice")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        # chunked bodies beside a length are how requests are smuggled past a proxy (RFC 9112, 6.1)
        if "transfer-encoding" in headers:
            raise RequestError(411, "send a Content-Length instead of a Transfer-Encoding")
        text = headers.get("content-length", "0")
        if not re.fullmatch(r"[0-9]{1,12}", text):
            raise RequestError(400, "the Content-Length is not a number")
        if (length := int(text)) > BODY_BYTES:
            raise RequestError(413, "the request's body is too long")
        while len(self._buffer) < length:
            self._receive(deadline, begun=True)
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        asks = headers.get("connection", "").lower()
        stays = asks != "close" if match[3] == b"1" else asks == "keep-alive"
        return Request(match[1].decode(), match[2].decode(), headers, body, stays)

    def _receive(self, deadline: float, *, begun: bool) -> None:
        """Read more bytes; answer a client that has begun a request and is late."""
        try:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._sock.recv(HEAD_BYTES)
        except TimeoutError:
            if begun:
                raise RequestError(408, "the request took too long to arrive") from None
            raise Closed from None
        except OSError:
            raise Closed from None
        if not data:
            raise Closed
        self._buffer += data


def send_bytes(sock: socket.socket, data: bytes, *, more: bool = False) -> None:
    """Send an answer or its head; with `more`, the head leaves in one packet with the rest."""
    try:
        sock.settimeout(STALL_S)
        if more and not isinstance(sock, ssl.SSLSocket):
            data = data[sock.send(data, socket.MSG_MORE) :]
        if data:
            sock.sendall(data)
    except OSError as error:
        raise Incomplete(str(error)) from None


def send_part(sock: socket.socket, part: FilePart) -> None:
    """Send a part, its last bytes only if the file is still the proved one by then.

    A client that gets too few bytes discards them or asks again. What is written to a file after
    its last bytes were taken may still change pages that are being sent: no server that does not
    copy can rule that out, and our own fetch hashes what arrives.
    """
    sent = noted = 0
    tail, deadline = min(part.length, _TAIL_BYTES), time.monotonic() + STALL_S
    try:
        while sent < part.length - tail:
            part.require_unchanged()
            want, offset = min(part.length - tail - sent, _ONCE_BYTES), part.start + sent
            # a client that reads too slowly only blocks the connection
            if (patience_s := deadline - time.monotonic()) <= 0:
                raise Incomplete("the client does not read")
            try:
                if isinstance(sock, ssl.SSLSocket):
                    data = os.pread(part.handle, min(want, _COPY_BYTES), offset)
                    sock.settimeout(patience_s)
                    sock.sendall(data)
                    count = len(data)
                else:
                    # from the page cache to the network, without a copy through Python
                    count = os.sendfile(sock.fileno(), part.handle, offset, want)
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(sock, select.POLLOUT)
                waiting.poll(patience_s * 1000)
                continue
            if not count:
                raise Incomplete("the file became shorter while it was sent")
            sent += count
            if sent - noted >= _LEAST_BYTES:
                noted, deadline = sent, time.monotonic() + STALL_S
        # copied, so that what is sent is what was in the file at the check that follows
        last = os.pread(part.handle, tail, part.start + sent)
        part.require_unchanged()
        if len(last) != tail:
            raise Incomplete("the file became shorter while it was sent")
        send_bytes(sock, last)
    except OSError as error:
        raise Incomplete(str(error)) from None
