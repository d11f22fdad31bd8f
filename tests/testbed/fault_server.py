"""A package index and file server on loopback that misbehaves on request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import quote, unquote

from tests.testbed.quiet_server import serving

JSON_PAGE = "application/vnd.pypi.simple.v1+json"
HTML_PAGE = "text/html"
_SLICE_BYTES = 1 << 14


@dataclass(frozen=True)
class Asked:
    """One request, as it came in."""

    method: str
    path: str
    start: int
    has_login: bool


@dataclass
class FaultServer:
    """What is served, what goes wrong, and what was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    page_type: str = JSON_PAGE
    says_size: bool = True
    says_hash: bool = True
    absolute_links: bool = False
    login: str = ""
    bytes_per_s: float = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def index(self) -> str:
        """The address of the simple index."""
        return f"{self.url}/simple/"

    def add(self, name: str, data: bytes) -> str:
        """Serve a file; returns its address."""
        self.files[f"/files/{name}"] = data
        return f"{self.url}/files/{quote(name)}"

    def fail(self, path: str, fault: Fault, times: int = 1) -> None:
        """Answer the next requests for a path in a bad way."""
        self.faults.setdefault(path, []).extend([fault] * times)

    def fail_file(self, name: str, fault: Fault, times: int = 1) -> None:
        self.fail(f"/files/{name}", fault, times)

    def starts(self, name: str) -> list[int]:
        """From which byte a file was asked for, request by request."""
        return [a.start for a in self.asked if a.path == f"/files/{name}" and a.method == "GET"]

    def next_fault(self, path: str) -> Fault | None:
        queue = self.faults.get(path)
        return queue.pop(0) if queue else None

    def page(self, project: str) -> bytes | None:
        """A project's page of the index, None where it has no such project."""
        found = [p for p in self.files if _project(p) == project]
        if not found:
            return None
        if self.page_type == JSON_PAGE:
            return json.dumps(
                {
                    "meta": {"api-version": "1.0"},
                    "name": project,
                    "files": [self._json_file(path) for path in found],
                }
            ).encode()
        links = [self._html_file(path) for path in found]
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()

    def _link(self, path: str) -> str:
        return f"{self.url if self.absolute_links else '../..'}{quote(path)}"

    def _json_file(self, path: str) -> dict[str, object]:
        data = self.files[path]
        hashes = {"sha256": hashlib.sha256(data).hexdigest()} if self.says_hash else {}
        size = {"size": len(data)} if self.says_size else {}
        name = path.rpartition("/")[2]
        return {"filename": name, "url": self._link(path), "hashes": hashes, **size}

    def _html_file(self, path: str) -> str:
        digest = hashlib.sha256(self.files[path]).hexdigest()
        mark = f"#sha256={digest}" if self.says_hash else ""
        return f'<a href="{self._link(path)}{mark}">{path.rpartition("/")[2]}</a>'


def _project(path: str) -> str:
    name = path.rpartition("/")[2].partition("-")[0]
    return re.sub(r"[-_.]+", "-", name).lower()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bed: FaultServer

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        found = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        has_login = bool(self.headers.get("Authorization"))
        self.bed.asked.append(Asked(self.command, path, start, has_login))
        with suppress(BrokenPipeError, ConnectionResetError):
            self._answer(path, start, has_login)

    do_HEAD = do_GET

    def _answer(self, path: str, start: int, has_login: bool) -> None:
        fault = self.bed.next_fault(path)
        if fault is not None:
            return fault(self, self.bed.files.get(path, b""), start)
        if self.bed.login and not has_login:
            return self.send(401, b"who are you?")
        if self.bed.login and self.headers["Authorization"] != _basic(self.bed.login):
            return self.send(403, b"not you")
        page = re.fullmatch(r"/simple/([^/]+)/", path)
        data = self.bed.page(page[1]) if page else self.bed.files.get(path)
        if data is None:
            return self.send(404, b"no such file")
        if page:
            return self.send(200, data, {"Content-Type": self.bed.page_type})
        self.send_file(data, start)

    def send_file(self, data: bytes, start: int = 0) -> None:
        """A good answer, from a byte on."""
        if start >= len(data) > 0:
            return self.send(416, b"")
        span = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self.send(206 if start else 200, data[start:], span)

    def send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        length: int | None = None,
        upto: int | None = None,
    ) -> None:
        """Status, headers and body; `length` is claimed, `upto` is where the connection is cut."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.pour(body[:upto])
        if upto is not None or length is not None:
            self.hang_up()

    def pour(self, body: bytes) -> None:
        """Write slowly where asked to, and count."""
        path = unquote(self.path)
        for at in range(0, len(body), _SLICE_BYTES):
            piece = body[at : at + _SLICE_BYTES]
            self.wfile.write(piece)
            sent = self.bed.sent_bytes
            sent[path] = sent.get(path, 0) + len(piece)
            if self.bed.bytes_per_s:
                time.sleep(len(piece) / self.bed.bytes_per_s)

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return


Fault = Callable[[_Handler, bytes, int], None]


def _basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


def status(code: int, **headers: str) -> Fault:
    """Only a status; header names are written with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, data, start: handler.send(code, b"a bad day", named)


def cut(after: int) -> Fault:
    """The connection breaks in the body."""

    def answer(handler: _Handler, data: bytes, start: int) -> None:
        span = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        handler.send(206 if start else 200, data[start:], span, upto=after)

    return answer


def cut_without_length(after: int) -> Fault:
    """A body that only the end of the connection ends, too early."""

    def answer(handler: _Handler, data: bytes, start: int) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.pour(data[:after])
        handler.hang_up()

    return answer


def stall(after: int) -> Fault:
    """Some bytes, then nothing more while the server lives."""

    def answer(handler: _Handler, data: bytes, start: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.pour(data[:after])
        handler.wfile.flush()
        handler.bed.stopping.wait()
        handler.hang_up()

    return answer


def silent() -> Fault:
    """Not even headers."""

    def answer(handler: _Handler, data: bytes, start: int) -> None:
        handler.bed.stopping.wait()
        handler.hang_up()

    return answer


def instead(other: bytes, kind: str = "application/octet-stream") -> Fault:
    """Other bytes, honestly sent."""
    return lambda handler, data, start: handler.send(200, other, {"Content-Type": kind})


def in_chunks(other: bytes) -> Fault:
    """Other bytes, without a length."""

    def answer(handler: _Handler, data: bytes, start: int) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.pour(f"{len(other):x}\r\n".encode() + other + b"\r\n0\r\n\r\n")

    return answer


def whole_file() -> Fault:
    """200 and everything, whatever range was asked for."""
    return lambda handler, data, start: handler.send(200, data)


def span_from(claimed: int, really: int) -> Fault:
    """206 whose Content-Range says one thing and whose body is another."""

    def answer(handler: _Handler, data: bytes, start: int) -> None:
        span = {"Content-Range": f"bytes {claimed}-{len(data) - 1}/{len(data)}"}
        body = data[really:][: len(data) - claimed]
        handler.send(206, body, span)

    return answer


def claiming_length(length: int) -> Fault:
    """A Content-Length that is not the body's."""
    return lambda handler, data, start: handler.send(200, data, length=length)


def redirect(to: str) -> Fault:
    return lambda handler, data, start: handler.send(302, b"", {"Location": to})


@contextmanager
def fault_server() -> Iterator[FaultServer]:
    """Run it on a free port until the block ends."""
    bed = FaultServer()
    with serving(_Handler, bed=bed) as bed.url:
        try:
            yield bed
        finally:
            bed.stopping.set()
