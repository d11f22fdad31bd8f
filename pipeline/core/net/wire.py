"""One HTTP/1.1 request over asyncio, bounded in bytes and time, with the time of every piece.

The rest of pipeline.core.net is for threads and for downloads; here hundreds of answers stream at
the same time, and when each piece arrived is part of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.core.errors import InputInvalid
from pipeline.core.net.address import shown_address
from pipeline.core.net.framing import FramedAnswer, Malformed
from pipeline.core.net.route import tls_context

_PIECE_BYTES = 1 << 16
# Each piece takes memory, however few bytes it has.
_LEAST_COST = 16


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
        """Reads an address that a user typed; `/v1` at its end is the same server."""
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


@dataclass(slots=True, eq=False)
class _TimedAnswer(FramedAnswer):
    started: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    _cost_bytes: int = 0

    def take(self, data: bytes, now: float) -> None:
        self._cost_bytes += max(len(data), _LEAST_COST)
        if self._cost_bytes > self.most_bytes:
            raise Malformed(f"the answer is larger than {self.most_bytes} bytes")
        self.pieces.append((now - self.started, data))


@dataclass
class KeptConnection:
    """A connection for several requests in turn; none is open before the first."""

    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    reuses: int = 0

    def close(self) -> None:
        if self.streams:
            self.streams[1].close()
        self.streams = None


async def send(
    address: Address,
    method: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    limit_s: float,
    most_bytes: int,
    kept: KeptConnection | None = None,
    hang_up_after: int | None = None,
) -> Raw:
    """Sends one request and reads its whole answer; `AnswerLost` if that does not come in time.

    It closes the connection after `hang_up_after` pieces of the answer, as users do.
    """
    answer = _TimedAnswer(most_bytes=most_bytes, is_last=kept is None)
    lines = {
        "Host": address.netloc,
        "User-Agent": "sm120-smoke",
        "Accept-Encoding": "identity",
        # a connection each: what streams share is the server, not a socket
        "Connection": "keep-alive" if kept else "close",
        "Content-Length": str(len(body)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    request = f"{method} {address.base}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
    try:
        async with asyncio.timeout(limit_s):
            if kept and kept.streams:
                reader, writer = kept.streams
                kept.streams, kept.reuses = None, kept.reuses + 1
            elif address.socket:
                reader, writer = await asyncio.open_unix_connection(address.socket)
            else:
                context = tls_context() if address.is_tls else None
                host, port = address.host, address.port
                reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                answer.started = time.monotonic()
                writer.write(request)
                await writer.drain()
                while not answer.whole:
                    if hang_up_after is not None and len(answer.pieces) >= hang_up_after:
                        raise AnswerLost("the client hung up", answer.pieces)
                    data = await reader.read(_PIECE_BYTES)
                    if data:
                        answer.feed(data, time.monotonic())
                        continue
                    answer.ended()
                    if not answer.whole:
                        raise EOFError
                seconds = time.monotonic() - answer.started
                return Raw(answer.status, answer.headers, answer.pieces, seconds)
            finally:
                if kept and answer.whole and answer.reusable:
                    kept.streams = reader, writer
                else:
                    writer.close()
    except TimeoutError as error:
        raise AnswerLost(f"no whole answer within {limit_s:g} s", answer.pieces) from error
    except ConnectionRefusedError as error:
        raise AnswerLost("no server listens at the address", answer.pieces) from error
    except EOFError as error:
        raise AnswerLost("the connection ended in mid-answer", answer.pieces) from error
    except (OSError, ValueError) as error:
        raise AnswerLost(str(error) or type(error).__name__, answer.pieces) from error
