"""A server whose truth is known: how fast it writes alone and beside a read, and what it caches.

`python -m tests.testbed.paced JSON` runs it in a process of its own, so that the client that is
judged does not slow it down, until its stdin ends. A fault makes it dishonest.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.serving.bench.answer import run_loop
from pipeline.serving.bench.stub import (
    Pacing,
    StubConnection,
    Truth,
    chunk,
    count_prompt,
    event,
    usage,
)

_ROOT = Path(__file__).resolve().parents[2]
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_HELD_S = 0.4
_WORDS = [f" {a}{b}" for a in "bdfgklmnprst" for b in ("ar", "el", "ion", "um", "os", "ith")]


@dataclass(frozen=True)
class Paces:
    """The truth."""

    alone_s: float = 0.02  # for a token
    loaded_s: float = 0.1  # for a token, while somebody reads
    read_tok_s: float = 1000.0
    long_tokens: int = 500  # a prompt of so many is a read
    stops: bool = False  # writers wait for a read as a whole
    cache_words: int = 0  # prefixes are cached in blocks of so many words
    fault: str = ""


@dataclass
class _World:
    paces: Paces
    reading: int = 0
    requests: int = 0
    known: set[bytes] = field(default_factory=set)  # prefixes that are cached


class _Paced(StubConnection):
    def __init__(self, world: _World) -> None:
        super().__init__(Pacing(), Truth())
        self.world = world
        self.cached: int | None = None

    def answer(self, request: bytes, tokens: int) -> None:
        world, paces = self.world, self.world.paces
        world.requests += 1
        self.prompt_tokens, self.cached = count_prompt(request), None
        fresh = self.prompt_tokens
        if paces.cache_words:
            self.cached = self._from_cache(request)
            fresh -= self.cached
        is_read = self.prompt_tokens >= paces.long_tokens
        if is_read and paces.fault == "read-refused":
            return self.write_json(b"400 Bad Request", b'{"error": "the prompt is too long"}')
        if is_read and paces.fault == "read-cached":
            self.cached, fresh = self.prompt_tokens - 1, 1
        if is_read and paces.fault == "read-cut":
            self.prompt_tokens = fresh = self.prompt_tokens // 2
        if paces.fault == "cached-beyond":
            self.cached = self.prompt_tokens + 100
        if paces.fault == "cached-claimed":
            self.cached = self.prompt_tokens * 9 // 10
        if paces.fault == "at-once":
            events = b"".join(event(_word(n), n) for n in range(tokens))
            self.transport.write(_HEAD + events + self._end(tokens))
            return
        world.reading += is_read
        wait_s = fresh / paces.read_tok_s
        self.loop.call_later(wait_s, self._first, is_read, tokens, time.monotonic() + wait_s)

    def _from_cache(self, request: bytes) -> int:
        """The words of the longest known beginning; then all beginnings are known."""
        words = request.partition(b'"messages":')[2].split(b" ")[1:]
        size, hit = self.world.paces.cache_words, 0
        for end in range(size, len(words) + 1, size):
            beginning = b" ".join(words[:end])
            hit = end if hit == end - size and beginning in self.world.known else hit
            self.world.known.add(beginning)
        return hit

    def _first(self, is_read: bool, tokens: int, due: float) -> None:
        self.world.reading -= is_read
        self.transport.write(_HEAD)
        self._token(0, tokens, due)

    def _token(self, number: int, tokens: int, due: float) -> None:
        paces, is_loaded = self.world.paces, self.world.reading > 0
        if is_loaded and number and (paces.stops or paces.fault == "padded"):
            # nothing is written while somebody reads, or only what is no token
            if paces.fault == "padded":
                self.transport.write(event(_word(number + due), number))
            due += paces.alone_s
            later = max(0.0, due - time.monotonic())
            self.loop.call_later(later, self._token, number, tokens, due)
            return
        billed = tokens
        if paces.fault == "bills-more":
            tokens = max(2, tokens // 2) if not number else tokens
            billed = tokens * 2
        text = " the same words again and again," if paces.fault == "loops" else _word(number + due)
        data = event(text, number)
        if number + 1 >= tokens:
            self.transport.write(data + self._end(billed))
            return
        self.transport.write(data)
        is_held = is_loaded and paces.fault == "bursts"
        due += paces.loaded_s if is_loaded and not is_held else paces.alone_s
        # all that is owed comes together, and the rate looks as it does alone
        at = math.ceil(due / _HELD_S) * _HELD_S if is_held else due
        later = max(0.0, at - time.monotonic())
        self.loop.call_later(later, self._token, number + 1, tokens, due)

    def _end(self, tokens: int) -> bytes:
        counted: dict[str, object] = dict(usage(self.prompt_tokens, tokens))
        if self.cached is not None:
            counted["prompt_tokens_details"] = {"cached_tokens": self.cached}
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        parts = [json.dumps(end), json.dumps({"choices": [], "usage": counted}), "[DONE]"]
        return chunk("".join(f"data: {part}\n\n" for part in parts).encode()) + b"0\r\n\r\n"


def _word(place: float) -> str:
    # another order for each answer: repeated text would void the trial
    at = int(place * 1009) if place % 1 else int(place)
    return _WORDS[(at * 7 + at // len(_WORDS)) % len(_WORDS)]


async def _serve(paces: Paces) -> None:
    loop, done, world = asyncio.get_running_loop(), asyncio.Event(), _World(paces)
    server = await loop.create_server(lambda: _Paced(world), "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)

    def wait() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=wait, daemon=True).start()
    await done.wait()


@contextmanager
def paced_server(paces: Paces) -> Iterator[str]:
    """Its address, until the block ends."""
    command = [sys.executable, "-m", "tests.testbed.paced", json.dumps(asdict(paces))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            yield f"http://127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.stdin.close()
            child.wait(30)


if __name__ == "__main__":
    run_loop(_serve(Paces(**json.loads(sys.argv[1]))))
    os._exit(0)
