"""The way into a registry, where every request is counted and some go wrong.

Behind it stands a real registry (`behind`), or a small one in memory (`tiny_registry`).
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.testbed.quiet_server import serving

_PIECE_BYTES = 1 << 16
_HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "keep-alive")


class HangUp(Exception):
    """The connection breaks here."""


@dataclass
class Request:
    """A request whose body is still on its way."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    size_bytes: int
    read: Callable[[int], bytes]
    received: int = 0
    cut_after: int | None = None
    bytes_per_s: float = 0

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes in; it may be made to break off."""
        end = self.size_bytes if self.cut_after is None else min(self.cut_after, self.size_bytes)
        while self.received < end:
            piece = self.read(min(_PIECE_BYTES, end - self.received))
            if not piece:
                raise HangUp
            self.received += len(piece)
            if self.bytes_per_s:
                time.sleep(len(piece) / self.bytes_per_s)
            yield piece
        if end < self.size_bytes:
            raise HangUp

    def body(self) -> bytes:
        return b"".join(self.pieces())


@dataclass(frozen=True)
class Reply:
    """An answer; `upto` is where its body breaks off."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    upto: int | None = None


Backend = Callable[[Request], Reply]
Fault = Callable[[Request, Backend], Reply]


@dataclass
class Door:
    """What was asked, what goes wrong next, and where requests go."""

    backend: Backend
    url: str = ""
    asked: list[Request] = field(default_factory=list)
    faults: list[tuple[str, re.Pattern[str], Fault]] = field(default_factory=list)
    bytes_per_s: float = 0
    busy: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Counts who is inside."""
        with self.guard:
            self.busy += 1
        try:
            yield
        finally:
            with self.guard:
                self.busy -= 1

    def wait_until_idle(self) -> None:
        """A client that was killed may have left a request that the registry still works on."""
        while self.busy:
            time.sleep(0.01)

    @property
    def host_port(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def uploaded_bytes(self) -> int:
        """Bytes of blobs that came in."""
        return sum(a.received for a in self.asked if "/blobs/uploads/" in a.path)

    def fail(self, method: str, pattern: str, fault: Fault, times: int = 1) -> None:
        """Let the next requests of a kind go wrong."""
        self.faults += [(method, re.compile(pattern), fault)] * times

    def count(self, method: str, pattern: str = "") -> int:
        return sum(a.method == method and bool(re.search(pattern, a.path)) for a in self.asked)

    def answer(self, request: Request) -> Reply:
        with self.guard:
            self.asked.append(request)
            fault = self._next_fault(request)
        return fault(request, self.backend) if fault else self.backend(request)

    def _next_fault(self, request: Request) -> Fault | None:
        for i, (method, pattern, fault) in enumerate(self.faults):
            if method == request.method and pattern.search(f"{request.path}?{request.query}"):
                del self.faults[i]
                return fault
        return None


def status(code: int, body: bytes = b"", **headers: str) -> Fault:
    """Only an answer; header names are written with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(request: Request, backend: Backend) -> Reply:
        request.body()
        return Reply(code, named, body)

    return answer


def drop() -> Fault:
    """No answer at all."""

    def answer(request: Request, backend: Backend) -> Reply:
        raise HangUp

    return answer


def cut(after: int) -> Fault:
    """The request's body breaks off, on both sides."""

    def answer(request: Request, backend: Backend) -> Reply:
        request.cut_after = after
        return backend(request)

    return answer


def lose_answer() -> Fault:
    """The registry did it, but the answer is lost."""

    def answer(request: Request, backend: Backend) -> Reply:
        backend(request)
        raise HangUp

    return answer


def changed(change: Callable[[Reply], Reply]) -> Fault:
    """Another answer than the registry gave."""
    return lambda request, backend: change(backend(request))


def cut_answer(after: int) -> Fault:
    """The answer's body breaks off."""
    return changed(lambda reply: replace(reply, upto=after))


def with_headers(**headers: str) -> Fault:
    """The registry's answer with other headers."""
    named = {name.replace("_", "-").lower(): value for name, value in headers.items()}

    def change(reply: Reply) -> Reply:
        kept = {name: v for name, v in reply.headers.items() if name.lower() not in named}
        return replace(reply, headers={**kept, **named})

    return changed(change)


def with_body(body: bytes) -> Fault:
    return changed(lambda reply: replace(reply, body=body))


def behind(host_port: str) -> Backend:
    """Forward to a real registry that speaks plain http."""

    def forward(request: Request) -> Reply:
        connection = http.client.HTTPConnection(host_port, timeout=60)
        try:
            target = f"{request.path}?{request.query}" if request.query else request.path
            connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            for piece in request.pieces():
                connection.send(piece)
            raw = connection.getresponse()
            headers = {k.lower(): v for k, v in raw.getheaders() if k.lower() not in _HOP_BY_HOP}
            if request.method == "HEAD" and raw.headers.get("Content-Length"):
                headers["x-length"] = raw.headers["Content-Length"]
            return Reply(raw.status, headers, raw.read())
        finally:
            connection.close()

    return forward


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    door: Door

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        headers = {k.lower(): v for k, v in self.headers.items() if k.lower() != "connection"}
        request = Request(
            method=self.command,
            path=unquote(parts.path),
            query=parts.query,
            headers=headers,
            size_bytes=int(self.headers.get("Content-Length", 0)),
            read=self.rfile.read1 if hasattr(self.rfile, "read1") else self.rfile.read,
            bytes_per_s=self.door.bytes_per_s,
        )
        try:
            with self.door.passing():
                reply = self.door.answer(request)
            self._reply(reply)
        except (HangUp, OSError, http.client.HTTPException):
            self.close_connection = True
        if request.received < request.size_bytes:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    def _reply(self, reply: Reply) -> None:
        self.send_response(reply.status)
        headers = dict(reply.headers)
        length = headers.pop("x-length", str(len(reply.body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if reply.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[: reply.upto])
        if reply.upto is not None:
            self.wfile.flush()
            raise HangUp

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def oci_door(backend: Backend) -> Iterator[Door]:
    """Open the door on a free port until the block ends."""
    door = Door(backend)
    with serving(_Handler, door=door) as door.url:
        yield door
