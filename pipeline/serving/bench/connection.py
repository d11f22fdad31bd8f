"""A connection that carries one streamed request after another."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from pipeline.core.net.wire import Address
from pipeline.serving.bench.answer import Answer, Malformed
from pipeline.serving.bench.model import Failure


class Failed(Exception):
    """There was no whole answer."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


@dataclass(frozen=True)
class Target:
    """Where the requests go."""

    address: Address
    headers: Mapping[str, str]
    context: ssl.SSLContext | None = None

    def request(self, path: str, body: bytes) -> bytes:
        """The bytes of a whole request."""
        lines = [
            f"POST {self.address.base}{path} HTTP/1.1",
            f"Host: {self.address.netloc}",
            "User-Agent: sm120-bench",
            "Accept: text/event-stream",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@dataclass(slots=True, eq=False)
class Connection(asyncio.Protocol):
    """One socket. Times are taken where bytes arrive, before anything is done with them."""

    answer: Answer = field(default_factory=Answer)
    is_open: bool = False
    used: bool = False  # carried a request before
    sent: float = 0.0
    last_byte: float = 0.0
    _transport: asyncio.Transport | None = None
    _waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no child of asyncio's
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def send(self, request: bytes, *, keep_all: bool) -> asyncio.Future[None]:
        """Write a request; the future is done when its answer is whole, or failed."""
        assert self._transport is not None
        self.answer = Answer(keep_all=keep_all)
        self._waiter = asyncio.get_running_loop().create_future()
        self.sent = self.last_byte = time.monotonic()
        self._transport.write(request)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        now = self.last_byte = time.monotonic()
        if self._waiter is None:
            # no request waits for it: such a connection is not used again
            return self.close()
        try:
            whole = self.answer.feed(data, now)
        except Malformed as error:
            return self.fail("malformed", str(error))
        if whole:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._waiter is None:
            return
        self.answer.ended()
        if self.answer.whole:
            return self._finish()
        when = "before any answer" if self.answer.first_byte is None else "in mid-answer"
        self.fail("lost", f"the connection ended {when}")

    def _finish(self) -> None:
        waiter, self._waiter = self._waiter, None
        self.used = True
        if not self.answer.reusable:
            self.close()
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, kind: Failure, message: str) -> None:
        """Give the answer up, and the connection with it."""
        waiter, self._waiter = self._waiter, None
        self.close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(Failed(kind, message))

    @property
    def is_waiting(self) -> bool:
        return self._waiter is not None

    def close(self) -> None:
        """At once: what is still unsent or unread is of no use."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


async def connect(target: Target, limit_s: float) -> Connection:
    """A new connection, or `Failed`."""
    loop, address = asyncio.get_running_loop(), target.address
    try:
        async with asyncio.timeout(limit_s):
            if address.socket:
                _, connection = await loop.create_unix_connection(Connection, str(address.socket))
            else:
                host, port, context = address.host, address.port, target.context
                _, connection = await loop.create_connection(Connection, host, port, ssl=context)
    except TimeoutError as error:
        raise Failed("unconnected", f"no connection within {limit_s:g} s") from error
    except ConnectionRefusedError as error:
        raise Failed("unconnected", "no server listens at the address") from error
    except OSError as error:
        raise Failed("unconnected", str(error) or type(error).__name__) from error
    return connection
