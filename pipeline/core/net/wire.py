"""One HTTP/1.1 request over asyncio, bounded in bytes and time, with the time of every piece.

The rest of pipeline.core.net is for threads and for downloads; here hundreds of answers stream at
the same time, and when each piece arrived is part of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.core.errors import InputInvalid
from pipeline.core.net.address import number_in, shown_address
from pipeline.core.net.route import tls_context

_MOST_HEAD_BYTES = 1 << 16
_PIECE_BYTES = 1 << 16
# Each piece takes memory, however few bytes it has.
_LEAST_COST = 16
_MOST_SIZE_DIGITS = 16


class AnswerLost(Exception):
    """There was no whole answer."""

    def __init__(self, message: str, pieces: list[tuple[float, bytes]] | None = None) -> None:
        super().__init__(message)
        self.pieces = pieces or []  # what had arrived: evidence


@dataclass(frozen=True)
class Address:
    """Where a server listens, and what all of its paths begin with."""

    host: str
    port: int
    is_tls: bool
    base: str
    socket: Path | None = None  # that leads there, where another host's server is meant

    @classmethod
    def read(cls, url: str) -> Address:
        """From what a user typed; `/v1` at its end is the same server."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            # the error quotes what stands where a port should be: perhaps a password
            raise InputInvalid(f"{shown_address(url)!r} is not the address of a server") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise InputInvalid(
                f"{shown_address(url)!r} is not the address of a server",
                "Write http://HOST:PORT. Keys belong into SM120_API_KEY.",
            )
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, base)

    @property
    def netloc(self) -> str:
        """HOST:PORT, as URLs and requests write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.netloc}{self.base}"


@dataclass(frozen=True)
class Raw:
    """An answer as it came; times are seconds since the request was sent."""

    status: int
    headers: Mapping[str, str]
    pieces: list[tuple[float, bytes]]
    seconds: float

    @property
    def data(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


async def send(
    address: Address,
    method: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    limit_s: float,
    most_bytes: int,
) -> Raw:
    """One request, its whole answer; `Lost` where that does not come in time."""
    pieces: list[tuple[float, bytes]] = []
    lines = {
        "Host": address.netloc,
        "User-Agent": "sm120-smoke",
        "Accept-Encoding": "identity",
        # a connection each: what streams share is the server, not a socket
        "Connection": "close",
        "Content-Length": str(len(body)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    request = f"{method} {address.base}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
    try:
        async with asyncio.timeout(limit_s):
            limit = _MOST_HEAD_BYTES
            if address.socket:
                reader, writer = await asyncio.open_unix_connection(address.socket, limit=limit)
            else:
                context = tls_context() if address.is_tls else None
                host, port = address.host, address.port
                reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=limit)
            try:
                started, total = time.monotonic(), 0
                writer.write(request)
                await writer.drain()
                status, answered = await _read_head(reader)
                while 100 <= status < 200:  # a note that an answer will follow
                    status, answered = await _read_head(reader)
                async for data in _body(reader, answered, most_bytes):
                    total += max(len(data), _LEAST_COST)
                    if total > most_bytes:
                        raise ValueError(f"the answer is larger than {most_bytes} bytes")
                    pieces.append((time.monotonic() - started, data))
                return Raw(status, answered, pieces, time.monotonic() - started)
            finally:
                writer.close()
    except TimeoutError as error:
        raise AnswerLost(f"no whole answer within {limit_s:g} s", pieces) from error
    except ConnectionRefusedError as error:
        raise AnswerLost("no server listens at the address", pieces) from error
    except EOFError as error:
        raise AnswerLost("the connection ended in mid-answer", pieces) from error
    except (OSError, ValueError) as error:
        raise AnswerLost(str(error) or type(error).__name__, pieces) from error


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("the head of the answer is too long") from error
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError("the answer is not HTTP")
    pairs = (line.partition(":") for line in lines)
    return int(rest[:3]), {n.strip().lower(): v.strip() for n, colon, v in pairs if colon}


async def _body(
    reader: asyncio.StreamReader, headers: Mapping[str, str], most_bytes: int
) -> AsyncIterator[bytes]:
    """Chunks, a stated length, or until the connection ends."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            try:
                line = await reader.readuntil(b"\r\n")
            except asyncio.LimitOverrunError as error:
                raise ValueError("a chunk of the answer has a size without end") from error
            digits = line.split(b";")[0].strip()
            # int() also takes signs and underscores
            if not digits or not all(c in b"0123456789abcdefABCDEF" for c in digits):
                raise ValueError("a chunk of the answer has no size")
            if len(digits) > _MOST_SIZE_DIGITS:
                raise ValueError("a chunk of the answer is larger than any answer")
            if (size := int(digits, 16)) > most_bytes:
                raise ValueError(f"the answer is larger than {most_bytes} bytes")
            if not size:
                return
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    left = None
    if stated := headers.get("content-length", ""):
        left = number_in(stated)  # int() also takes signs, underscores and other digits
        if left is None:
            raise ValueError(f"the answer states a length of {stated[:40]!r}")
    while left is None or left > 0:
        data = await reader.read(min(_PIECE_BYTES, left or _PIECE_BYTES))
        if not data and left is not None:
            raise EOFError
        if not data:
            return
        yield data
        left = None if left is None else left - len(data)
