"""A server's answer: its head, and a body that is bounded in bytes and in time."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from typing import Any

import urllib3

from pipeline.core.errors import Interrupted
from pipeline.core.files import gunzipped
from pipeline.core.net.address import number_in, shown_address, without_controls
from pipeline.core.net.connections import Connections, end_socket
from pipeline.core.net.failures import BadAnswer, Lost
from pipeline.core.net.timing import HttpLimits

_MOST_AT_ONCE = 1 << 18


def decoded(pieces: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """The pieces of a body as they were before compression, a little at a time."""
    if encoding in ("", "identity"):
        yield from pieces
        return
    if encoding not in ("gzip", "x-gzip"):
        raise BadAnswer(f"has the content encoding {encoding[:20]!r}, which was not requested")
    try:
        yield from gunzipped(pieces, _MOST_AT_ONCE)
    except zlib.error as error:
        raise BadAnswer("has damaged compression") from error
    except EOFError as error:
        raise BadAnswer("has a compressed body that is cut off") from error


# half the CPU and wall time of taking each TLS record as it comes, measured on 267 MB
PIECE_BYTES = 1 << 18
_SMALL_BYTES = 1 << 16
# Reading a short rest is cheaper than a new connection with TLS.
_MOST_LEFT_BYTES = 8192
BREAKS = (OSError, HTTPException, urllib3.exceptions.HTTPError, ValueError)


class Answer:
    """Status and headers, and bytes that are still to come."""

    def __init__(
        self,
        raw: urllib3.BaseHTTPResponse,
        method: str,
        url: str,
        connections: Connections,
        limits: HttpLimits,
    ) -> None:
        self.status, self.url = raw.status, url
        self.headers = raw.headers
        self._raw, self._limits, self._has_body = raw, limits, method != "HEAD"
        self._stop, self._watch = connections.stop, connections.watch
        self._sock, self._since = connections.slot.sock, time.monotonic()
        # Below urllib3, whose own `readinto` makes a copy. And only `readinto`: the standard
        # library's `read` believes a chunk that claims to have -1 bytes, and reads for ever.
        self._source: Any = raw._original_response  # type: ignore[attr-defined]
        # another coding's framing would be taken for the body's content
        coding = self.header("Transfer-Encoding").strip().lower()
        if coding not in ("", "identity", "chunked"):
            self.close()
            raise BadAnswer(
                f"has the transfer coding {without_controls(coding)[:40]!r},"
                " which was not requested"
            )

    def header(self, name: str) -> str:
        return self.headers.get(name) or ""

    @property
    def length(self) -> int | None:
        """The stated length of the body; none where it is missing or not a number."""
        # the same twice is allowed (RFC 9110, 8.6); two that differ are refused when they are read
        stated = {part.strip() for part in self.header("Content-Length").split(",")}
        return number_in(stated.pop()) if len(stated) == 1 else None

    def readinto(self, buffer: memoryview, most_s: float | None = None) -> int:
        """Fills the buffer, or what the body still has of it; 0 at its end, `Lost` before that."""
        if self._stop.is_set():
            raise Interrupted("stopped")
        self._watch.begin(id(self), lambda: end_socket(self._sock), most_s or self._limits.piece_s)
        why: BaseException | None = None
        count = 0
        try:
            count = self._source.readinto(buffer)
        except BREAKS as error:
            why = error
        finally:
            in_time = self._watch.end(id(self))
        if self._stop.is_set():
            raise Interrupted("stopped")
        if not in_time:
            raise self._lost("the server sends too slowly", is_stall=True)
        if why is not None:
            is_stall = isinstance(why, TimeoutError)
            reason = "no more data arrived" if is_stall else "the connection broke off"
            raise self._lost(reason, is_stall=is_stall) from why
        if not count and len(buffer) and (missing := self._source.length):
            raise self._lost(f"the connection ended {missing} bytes early")
        return count

    def _lost(self, reason: str, *, is_stall: bool = False) -> Lost:
        self.close()
        return Lost(f"{shown_address(self.url)}: {reason}", is_stall=is_stall)

    def pieces(self, most_bytes: int | None = None) -> Iterator[memoryview]:
        """The body as it comes, in pieces large enough that hashing them is the work.

        Each is good until the next one is asked for.
        """
        buffer = memoryview(bytearray(PIECE_BYTES))
        budget = most_bytes
        while budget != 0:
            count = self.readinto(buffer if budget is None else buffer[:budget])
            if not count:
                return
            budget = None if budget is None else budget - count
            yield buffer[:count]

    def read(self, most_bytes: int, *, decode: bool = True) -> bytes:
        """The whole body, decompressed; more bytes than that, or too slow, is an error.

        A file is not decoded: some servers call every `.gz` an encoding of something else.
        """
        if not self._has_body:
            self.close()
            return b""
        data = bytearray()
        encoding = self.header("Content-Encoding").strip().lower() if decode else ""
        try:
            for piece in decoded(self._steadily(most_bytes), encoding):
                data += piece
                if len(data) > most_bytes:
                    raise BadAnswer(f"is larger than {most_bytes} bytes")
        except BadAnswer as error:
            self.close()
            raise BadAnswer(f"{shown_address(self.url)}: {error}") from error
        self.close()
        return bytes(data)

    def _steadily(self, most_bytes: int) -> Iterator[bytes]:
        """Reads small pieces, each in the time that the answer as a whole has left."""
        stated = self.header("Content-Length")
        if stated and self.length is None and not self.header("Transfer-Encoding"):
            raise BadAnswer(f"states a length of {without_controls(stated)[:20]!r} bytes")
        if (self.length or 0) > most_bytes:
            raise BadAnswer(f"is larger than {most_bytes} bytes")
        buffer, got, limits = memoryview(bytearray(_SMALL_BYTES)), 0, self._limits
        while got <= most_bytes:
            allowed_s = limits.grace_s + got / limits.least_bytes_per_s
            remaining_s = self._since + allowed_s - time.monotonic()
            if remaining_s <= 0:
                raise self._lost("the server sends too slowly", is_stall=True)
            count = self.readinto(buffer, remaining_s)
            if not count:
                return
            got += count
            yield bytes(buffer[:count])
        raise BadAnswer(f"is larger than {most_bytes} bytes")

    def drain(self) -> None:
        """Keeps the connection where next to nothing is left of the body, and closes it if not."""
        try:
            if self.length is not None and self.length <= _MOST_LEFT_BYTES:
                self.readinto(memoryview(bytearray(_MOST_LEFT_BYTES)), self._limits.grace_s)
        except Lost:
            return
        self.close()

    def close(self) -> None:
        """Gives the connection back if the body was read to its end, else ends it."""
        # the standard library closes an answer that has a length only when asked for more
        if self._source is not None and self._source.length == 0:
            self._source.close()
        if self._source is not None and not self._source.isclosed():
            self._raw.close()
        self._raw.release_conn()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pages:
    """Counts the pages of one list."""

    def __init__(self, what: str, most_pages: int, most_s: float) -> None:
        self._what, self._most_pages, self._most_s = what, most_pages, most_s
        self._until = time.monotonic() + most_s
        self._seen: set[str] = set()

    def take(self, address: str) -> None:
        """Counts one more page; `BadAnswer` where the list would never end."""
        if address in self._seen:
            raise BadAnswer(f"{self._what} repeats a page and does not end")
        self._seen.add(address)
        if len(self._seen) > self._most_pages:
            raise BadAnswer(f"{self._what} does not end: more than {self._most_pages} pages")
        if time.monotonic() > self._until:
            raise BadAnswer(f"{self._what} does not end: more than {self._most_s:g} s")
