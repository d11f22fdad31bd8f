"""A server for benchmarks on loopback: the stub with known pacing, with one fault on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.serving.bench.stub import Pacing, StubConnection, Truth, chunk, event, last_events

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class World:
    """What the connections of one server share."""

    fault: str = ""
    pacing: Pacing = field(default_factory=lambda: Pacing(0.01, 0.002))
    requests: int = 0
    connections: int = 0
    is_dead: bool = False
    refused: dict[bytes, int] = field(default_factory=dict)
    metrics: str = ""
    bodies: list[bytes] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None


class FaultyConnection(StubConnection):
    """Answers as the stub does, but for the fault."""

    def __init__(self, world: World) -> None:
        super().__init__(world.pacing, Truth())
        self.world = world

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.world.connections += 1
        if self.world.is_dead:
            self.transport.abort()

    def answer_get(self, request: bytes) -> None:
        if request.startswith(b"GET /metrics ") and self.world.metrics:
            return self.write_json(b"200 OK", self.world.metrics.encode())
        super().answer_get(request)

    def answer(self, request: bytes, tokens: int) -> None:
        self.world.requests += 1
        self.world.bodies.append(request.partition(b"\r\n\r\n")[2])
        fault = getattr(self, f"fault_{self.world.fault.replace('-', '_')}", None)
        if fault is None or not fault(request, tokens):
            super().answer(request, tokens)

    def fault_dies(self, request: bytes, tokens: int) -> bool:
        """After the sixth request nobody is there any more."""
        if self.world.requests <= 6:
            return False
        self.world.is_dead = True
        self.transport.write(_HEAD + event(" a", 1))
        self.loop.call_later(0.01, self.transport.abort)
        self.world.stop()
        return True

    def fault_stalls(self, request: bytes, tokens: int) -> bool:
        """One answer stops in the middle and leaves its connection open."""
        if self.world.requests != 3:
            return False
        self.transport.write(_HEAD + event(" a", 1) + event(" b", 2))
        return True

    def fault_endless(self, request: bytes, tokens: int) -> bool:
        """One answer never ends, whatever was asked for."""
        if self.world.requests != 3:
            return False
        self.transport.write(_HEAD)
        self._more(0)
        return True

    def _more(self, number: int) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"".join(event(f" w{number + n}", n) for n in range(100)))
            self.loop.call_later(0.01, self._more, number + 100)

    def fault_silent(self, request: bytes, tokens: int) -> bool:
        """Connections are taken, requests read, nothing is ever said: half-open sockets."""
        return True

    def fault_malformed(self, request: bytes, tokens: int) -> bool:
        if self.world.requests != 2:
            return False
        self.transport.write(_HEAD + event(" a", 1) + chunk(b'data: {"choices": [{"del\n\n'))
        return True

    def fault_not_http(self, request: bytes, tokens: int) -> bool:
        if self.world.requests != 2:
            return False
        self.transport.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        return True

    def fault_cut(self, request: bytes, tokens: int) -> bool:
        if self.world.requests != 2:
            return False
        self.transport.write(_HEAD + event(" a", 1) + b"0\r\n\r\n")
        return True

    def fault_cut_done(self, request: bytes, tokens: int) -> bool:
        """A proxy ends the stream politely after two tokens; the engine gave no reason."""
        if self.world.requests != 2:
            return False
        done = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.transport.write(_HEAD + event(" a", 1) + event(" b", 2) + done)
        return True

    def fault_surplus(self, request: bytes, tokens: int) -> bool:
        """One request is answered twice in one write."""
        if self.world.requests != 2:
            return False
        events = b"".join(event(f" w{n}", n) for n in range(tokens))
        self.transport.write((_HEAD + events + last_events(tokens, 10)) * 2)
        return True

    def fault_comments(self, request: bytes, tokens: int) -> bool:
        """One answer goes on with comments after its first token."""
        if self.world.requests != 3:
            return False
        self.transport.write(_HEAD + event(" a", 1))
        self._comment(chunk(b": alive\n\n"))
        return True

    def fault_empty_deltas(self, request: bytes, tokens: int) -> bool:
        if self.world.requests != 3:
            return False
        self.transport.write(_HEAD + event(" a", 1))
        self._comment(chunk(b'data: {"choices": [{"delta": {"content": ""}}]}\n\n'))
        return True

    def _comment(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)
            self.loop.call_later(0.01, self._comment, data)

    def fault_empty(self, request: bytes, tokens: int) -> bool:
        if self.world.requests != 2:
            return False
        self.transport.write(_HEAD + last_events(0, 10))
        return True

    def fault_error_event(self, request: bytes, tokens: int) -> bool:
        if self.world.requests != 2:
            return False
        body = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
        self.transport.write(_HEAD + chunk(body) + b"0\r\n\r\n")
        return True

    def fault_busy(self, request: bytes, tokens: int) -> bool:
        """Every request is refused once, and taken the second time."""
        key = request.partition(b"\r\n\r\n")[2]
        self.world.refused[key] = self.world.refused.get(key, 0) + 1
        return self._refuse(b"429 Too Many Requests") if self.world.refused[key] == 1 else False

    def fault_always_busy(self, request: bytes, tokens: int) -> bool:
        return self._refuse(b"429 Too Many Requests")

    def _refuse(self, status: bytes) -> bool:
        head = b"HTTP/1.1 %b\r\nRetry-After: 0\r\nContent-Length: 4\r\n\r\nbusy"
        self.transport.write(head % status)
        return True

    def fault_usage_high(self, request: bytes, tokens: int) -> bool:
        return self._at_once(tokens, tokens * 10)

    def fault_usage_low(self, request: bytes, tokens: int) -> bool:
        return self._at_once(tokens, 1)

    def fault_usage_none(self, request: bytes, tokens: int) -> bool:
        events = b"".join(event(f" w{n}", n) for n in range(tokens))
        end = chunk(b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n')
        self.transport.write(_HEAD + events + end + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True

    def fault_short(self, request: bytes, tokens: int) -> bool:
        return self._at_once(tokens // 2, tokens // 2)

    def fault_loops(self, request: bytes, tokens: int) -> bool:
        events = b"".join(event(" the same words again and again,", n) for n in range(tokens))
        self.transport.write(_HEAD + events + last_events(tokens, 10))
        return True

    def fault_closes(self, request: bytes, tokens: int) -> bool:
        """Each connection carries one answer, and ends with it."""
        events = b"".join(event(f" w{n}", n) for n in range(tokens))
        head = _HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        self.transport.write(head + events + last_events(tokens, 10))
        self.transport.close()
        return True

    def fault_closes_silently(self, request: bytes, tokens: int) -> bool:
        """The same, without a word of it in the head, and a moment later."""
        events = b"".join(event(f" w{n}", n) for n in range(tokens))
        self.transport.write(_HEAD + events + last_events(tokens, 10))
        self.loop.call_later(0.001, self.transport.close)
        return True

    def _at_once(self, tokens: int, counted: int) -> bool:
        events = b"".join(event(f" w{n}", n) for n in range(tokens))
        self.transport.write(_HEAD + events + last_events(counted, 10))
        return True


@dataclass
class BenchServer:
    """Where it listens, and what it saw."""

    port: int
    world: World

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def bench_server(fault: str = "", pacing: Pacing | None = None) -> Iterator[BenchServer]:
    """The server in a thread, until the block ends."""
    loop = asyncio.new_event_loop()
    world = World(fault=fault, pacing=pacing or Pacing(0.01, 0.002))
    listening = loop.run_until_complete(
        loop.create_server(lambda: FaultyConnection(world), "127.0.0.1", 0, backlog=1024)
    )
    world.stop = listening.close
    port = listening.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield BenchServer(port, world)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        listening.close()
        loop.close()
