"""Streamed answers, read byte by byte as they come: server-sent events.

A `Connection` carries one request after another and hands over what it received and when; an
`Answer` neither waits nor opens anything. It is the hot path of the client, some ten microseconds
for a token, so it keeps only what metrics need.
"""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
import time
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from pipeline.core.net.framing import FramedAnswer, Malformed
from pipeline.core.net.wire import Address

if TYPE_CHECKING:
    from pipeline.serving.bench.model import Failure

try:
    import uvloop
except ImportError:
    uvloop = None
try:
    import orjson

    _loads: Callable[[bytes], Any] = orjson.loads
except ImportError:
    _loads = json.loads

EVENT_LOOP: Literal["uvloop", "asyncio"] = "uvloop" if uvloop else "asyncio"
JSON_READER: Literal["orjson", "json"] = "json" if _loads is json.loads else "orjson"

_MOST_LINE_BYTES = 1 << 22  # of one event
_MOST_REFUSAL_BYTES = 2000
_TAIL_CHARACTERS = 4000  # what `loops` reads
_PIECES = 2048


@dataclass(slots=True, eq=False)
class BenchAnswer(FramedAnswer):
    """What has arrived of one streamed answer."""

    keep_all: bool = False  # of its text, and not only the end
    times: array[float] = field(default_factory=lambda: array("d"))  # of each event with text
    usage: dict[str, Any] | None = None
    finish: str = ""
    error: str = ""
    done: bool = False  # [DONE] was seen
    characters: int = 0
    _pieces: list[str] = field(default_factory=list)
    _event_rest: bytes = b""
    _is_begun: bool = False

    @property
    def text(self) -> str:
        """All of it, or as much of its end as `loops` reads."""
        return "".join(self._pieces)

    def begin(self) -> None:
        kind = self.headers.get("content-type", "")
        if self.status == 200 and "text/event-stream" not in kind:
            raise Malformed(f"a stream was asked for, and the answer is {kind[:60] or 'no type'}")

    def take(self, data: bytes, now: float) -> None:
        if self.status != 200:
            if len(self.error) < _MOST_REFUSAL_BYTES:
                self.error += data.decode(errors="replace")
            return
        if self._event_rest:
            data = self._event_rest + data
        if not self._is_begun:
            # a stream may begin with a byte order mark, which is no part of its first line:
            # html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
            if len(data) < len(BOM_UTF8) and BOM_UTF8.startswith(data):
                self._event_rest = data
                return
            self._is_begun, data = True, data.removeprefix(BOM_UTF8)
        *lines, self._event_rest = data.split(b"\n")
        if len(self._event_rest) > _MOST_LINE_BYTES:
            raise Malformed("an event of the stream is too long")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                self.done = True
                continue
            try:
                value = _loads(event)
                # indexing, not `.get`: an event that has neither is malformed, or says what went
                # wrong
                if "choices" not in value:
                    fault = value["error"]
                    # servers wrap the message in more or less
                    message = fault.get("message") if isinstance(fault, dict) else None
                    is_text = isinstance(message, str) and message
                    self.error = str(message if is_text else fault)[:_MOST_REFUSAL_BYTES]
                    continue
                if choices := value["choices"]:
                    choice = choices[0]
                    delta = choice.get("delta")
                    # answer, thought or tool call: each is generated, and each counts as text
                    text = choice.get("text") if delta is None else str(delta.get("content") or "")
                    if not text and delta:
                        # vLLM calls it `reasoning`, SGLang and llama.cpp `reasoning_content`
                        text = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
                        calls = () if text else delta.get("tool_calls") or ()
                        for part in [call.get("function") or {} for call in calls]:
                            text += f"{part.get('name') or ''}{part.get('arguments') or ''}"
                    if text:
                        self.times.append(now)
                        self.characters += len(text)
                        self._pieces.append(text)
                        if len(self._pieces) > _PIECES and not self.keep_all:
                            self._pieces = ["".join(self._pieces)[-_TAIL_CHARACTERS:]]
                    if reason := choice.get("finish_reason"):
                        self.finish = str(reason)[:40]
                if usage := value.get("usage"):
                    self.usage = dict(usage)
            except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
                shown = event[:_MOST_REFUSAL_BYTES].decode(errors="replace")
                raise Malformed(f"an event of the stream cannot be read: {shown!r}") from error


def loops(text: str) -> str:
    """What an answer repeats at its end, again and again; empty where it does not.

    Not the pattern of smoke's `corruption`, which takes 40 ms: this judges thousands of answers.
    """
    tail = text[-_TAIL_CHARACTERS:]
    probe = tail[-32:]
    if len(probe) < 32:
        return ""
    before = tail.rfind(probe, 0, len(tail) - 1)
    if before < 0:
        return ""
    unit = tail[before + len(probe) :]
    # at least four times and 200 characters: refrains and tables come back, too
    times = max(4, -(-200 // len(unit)))
    is_text = any(c.isalpha() or c in "!?" for c in unit)
    return unit if is_text and tail.endswith(unit * times) else ""


class Failed(Exception):
    """The server gave no whole answer."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


@dataclass(slots=True, eq=False)
class Connection(asyncio.Protocol):
    """One socket. Times are taken where bytes arrive, before anything is done with them."""

    answer: BenchAnswer = field(default_factory=BenchAnswer)
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
        self.answer = BenchAnswer(keep_all=keep_all)
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
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._waiter is None:
            return
        self.answer.ended()
        if self.answer.whole:
            return self._end()
        when = "before any answer" if self.answer.first_byte is None else "in mid-answer"
        self.fail("lost", f"the connection ended {when}")

    def fail(self, kind: Failure, message: str) -> None:
        """Give up the answer, and the connection with it."""
        self._end(Failed(kind, message))

    def _end(self, error: Failed | None = None) -> None:
        waiter, self._waiter, self.used = self._waiter, None, True
        if error or not self.answer.reusable:
            self.close()
        if waiter is None or waiter.done():
            return
        if error:
            waiter.set_exception(error)
        else:
            waiter.set_result(None)

    @property
    def is_waiting(self) -> bool:
        return self._waiter is not None

    def close(self) -> None:
        """Close at once: nobody needs what is still unsent or unread."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


async def open_connection(
    address: Address, tls: ssl.SSLContext | None, limit_s: float
) -> Connection:
    """A new connection, or `Failed`."""
    loop, host, port = asyncio.get_running_loop(), address.host, address.port
    try:
        async with asyncio.timeout(limit_s):
            if address.socket:
                _, connection = await loop.create_unix_connection(Connection, str(address.socket))
            else:
                _, connection = await loop.create_connection(Connection, host, port, ssl=tls)
    except TimeoutError as error:
        raise Failed("unconnected", f"no connection within {limit_s:g} s") from error
    except ConnectionRefusedError as error:
        raise Failed("unconnected", "no server listens at the address") from error
    except OSError as error:
        raise Failed("unconnected", str(error) or type(error).__name__) from error
    return connection


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end, with as many sockets as the machine allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        runner.run(work)
