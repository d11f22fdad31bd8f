"""HTTP/1.1 as far as a read-only file server needs it, strict in what it accepts.

The standard library's http.server passes 10 of the 14 malformed requests that the tests list on to
its handler as good ones (doubled lengths, folded headers, bare newlines …) and has no deadline for
a whole request, so requests are read here.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass, field
from http import HTTPStatus

HEAD_BYTES = 16 << 10  # the Hub's client sends less than 1 kB
BODY_BYTES = 1 << 20  # of a `paths-info` question; the only requests with a body
HEAD_S = 10.0  # a request must be here, whole, this long after its first byte
IDLE_S = 60.0  # between two requests

_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
# Given twice, these would be read differently by us and by a proxy before us.
_ONCE = {"host", "content-length", "authorization", "range", "if-range", "content-type"}


class Refused(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, message: str, extra: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.extra = status, extra or {}


class Closed(Exception):
    """The client closed the connection, or sent nothing for too long between two requests."""


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
        line = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
        text = "".join(f"{name}: {_one_line(value)}\r\n" for name, value in rows.items())
        return f"{line}{text}\r\n".encode("latin-1", "replace")


class FilePart:
    """A range of an open file that must still be the proved one when its last bytes leave."""

    def __init__(self, handle: int, start: int, length: int, seen: object) -> None:
        self.handle, self.start, self.length, self.seen = handle, start, length, seen


def _one_line(value: str) -> str:
    # a line end in a value would begin a header of its own
    return "".join(c if c.isprintable() else "?" for c in value)


class Reader:
    """Takes requests off a connection, each within its limits of size and time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer = sock, b""

    def next(self, *, is_patient: bool = False) -> Request:
        """The next request; raises Closed at the end and Refused for what is not a request.

        A new client must send its request soon; only one that may read can stay idle.
        """
        is_idle = is_patient and not self._buffer
        deadline = time.monotonic() + (IDLE_S if is_idle else HEAD_S)
        while b"\r\n\r\n" not in self._buffer:
            if len(self._buffer) > HEAD_BYTES:
                raise Refused(431, "the headers are too long")
            if not self._buffer:
                self._more(deadline, started=False)
                deadline = time.monotonic() + HEAD_S
            else:
                self._more(deadline, started=True)
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        if len(head) > HEAD_BYTES:
            raise Refused(431, "the headers are too long")
        method, target, minor, headers = parse_head(head)
        body = self._body(headers, deadline)
        asks = headers.get("connection", "").lower()
        stays = asks != "close" if minor == 1 else asks == "keep-alive"
        return Request(method, target, headers, body, stays)

    def _body(self, headers: dict[str, str], deadline: float) -> bytes:
        # chunked bodies beside a length are how requests are smuggled past a proxy (RFC 9112, 6.1)
        if "transfer-encoding" in headers:
            raise Refused(411, "send a Content-Length instead of a Transfer-Encoding")
        text = headers.get("content-length", "0")
        if not re.fullmatch(r"[0-9]{1,12}", text):
            raise Refused(400, "the Content-Length is not a number")
        if (length := int(text)) > BODY_BYTES:
            raise Refused(413, "the request's body is too long")
        while len(self._buffer) < length:
            self._more(deadline, started=True)
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return body

    def _more(self, deadline: float, *, started: bool) -> None:
        try:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._sock.recv(HEAD_BYTES)
        except TimeoutError:
            if started:
                raise Refused(408, "the request took too long to arrive") from None
            raise Closed from None
        except OSError:
            raise Closed from None
        if not data:
            raise Closed
        self._buffer += data


def parse_head(head: bytes) -> tuple[str, str, int, dict[str, str]]:
    """Method, target, minor version and headers (names in small letters)."""
    first, *lines = head.split(b"\r\n")
    match = _LINE.fullmatch(first)
    if not match:
        raise Refused(400, "this is not an HTTP/1.1 request")
    if len(lines) > 100:
        raise Refused(431, "there are too many headers")
    headers: dict[str, str] = {}
    for line in lines:
        row = _FIELD.fullmatch(line)
        if not row:
            raise Refused(400, "a header is malformed")
        name, value = row[1].decode().lower(), row[2].decode("latin-1").strip()
        if name in headers and name in _ONCE:
            raise Refused(400, f"{name} is given twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return match[1].decode(), match[2].decode(), int(match[3]), headers
