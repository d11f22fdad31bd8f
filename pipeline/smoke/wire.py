"""One HTTP/1.1 request over asyncio, bounded in bytes and time, with the time of every piece.

pipeline.net is for threads and for downloads; here hundreds of answers stream at the same time,
and when each piece arrived is part of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.errors import InputInvalid
from pipeline.net.address import number_in, shown
from pipeline.net.route import tls_context

_MOST_HEAD_BYTES = 1 << 16
_PIECE_BYTES = 1 << 16
# Each piece takes memory, however few bytes it has.
_LEAST_COST = 16
_MOST_SIZE_DIGITS = 16


class Lost(Exception):
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
            raise InputInvalid(f"{shown(url)!r} is not the address of a server") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise InputInvalid(
                f"{shown(url)!r} is not the address of a server",
                "Write http://HOST:PORT. Keys belong into SM120_API_KEY.",
            )
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, base)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.base}"


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
    try:
        async with asyncio.timeout(limit_s):
            return await _send(address, method, path, body, headers, most_bytes, pieces)
    except TimeoutError as error:
        raise Lost(f"no whole answer within {limit_s:g} s", pieces) from error
    except (OSError, EOFError, ValueError) as error:
        raise Lost(_reason(error), pieces) from error


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens at the address"
    if isinstance(error, EOFError):
        return "the connection ended in mid-answer"
    return str(error) or type(error).__name__


async def _connected(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.socket:
        return await asyncio.open_unix_connection(address.socket, limit=_MOST_HEAD_BYTES)
    context = tls_context() if address.is_tls else None
    return await asyncio.open_connection(
        address.host, address.port, ssl=context, limit=_MOST_HEAD_BYTES
    )


async def _send(
    address: Address,
    method: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    most_bytes: int,
    pieces: list[tuple[float, bytes]],
) -> Raw:
    reader, writer = await _connected(address)
    try:
        started = time.monotonic()
        writer.write(_head(address, method, path, len(body), headers) + body)
        await writer.drain()
        status, answered = await _read_head(reader)
        while 100 <= status < 200:  # a note that an answer will follow
            status, answered = await _read_head(reader)
        await _read_body(reader, answered, pieces, started, most_bytes)
        return Raw(status, answered, pieces, time.monotonic() - started)
    finally:
        writer.close()


def _head(
    address: Address, method: str, path: str, length: int, headers: Mapping[str, str]
) -> bytes:
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = {
        "Host": f"{host}:{address.port}",
        "User-Agent": "sm120-smoke",
        "Accept-Encoding": "identity",
        # a connection each: what streams share is the server, not a socket
        "Connection": "close",
        "Content-Length": str(length),
        **headers,
    }
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {address.base}{path} HTTP/1.1\r\n{text}\r\n".encode("latin-1")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("the head of the answer is too long") from error
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError("the answer is not HTTP")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers


async def _read_body(
    reader: asyncio.StreamReader,
    headers: Mapping[str, str],
    pieces: list[tuple[float, bytes]],
    started: float,
    most_bytes: int,
) -> None:
    """Chunks, a stated length, or until the connection ends."""
    total = 0

    def keep(data: bytes) -> None:
        nonlocal total
        total += max(len(data), _LEAST_COST)
        if total > most_bytes:
            raise ValueError(f"the answer is larger than {most_bytes} bytes")
        pieces.append((time.monotonic() - started, data))

    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := _chunk_size(await _line(reader)):
            if size > most_bytes:
                raise ValueError(f"the answer is larger than {most_bytes} bytes")
            keep(await reader.readexactly(size))
            await reader.readexactly(2)
        return
    left = None
    if stated := headers.get("content-length", ""):
        left = number_in(stated)  # int() also takes signs, underscores and other digits
        if left is None:
            raise ValueError(f"the answer states a length of {stated[:40]!r}")
    while left is None or left > 0:
        data = await reader.read(min(_PIECE_BYTES, left or _PIECE_BYTES))
        if not data:
            if left is not None:
                raise EOFError
            return
        keep(data)
        left = None if left is None else left - len(data)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("a chunk of the answer has a size without end") from error


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";")[0].strip()
    # int() also takes signs and underscores
    if not digits or not all(c in b"0123456789abcdefABCDEF" for c in digits):
        raise ValueError("a chunk of the answer has no size")
    if len(digits) > _MOST_SIZE_DIGITS:
        raise ValueError("a chunk of the answer is larger than any answer")
    return int(digits, 16)
