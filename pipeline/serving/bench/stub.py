"""A server with known pacing: what the client measures itself against.

It streams as engines do, an event for each token, and notes when it wrote them. `python -m
pipeline.serving.bench.stub TTFT_S TPOT_S` runs it beside the client until its stdin ends; each line
there asks for the means since the last.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
import time
from array import array
from dataclasses import dataclass, field
from typing import cast

from pipeline.serving.bench.answer import run_loop

MODEL = "stub"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
_STREAM = re.compile(rb'"stream": *true')
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_MODELS = json.dumps(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sm120"}]}
).encode()
# As many words as make a text that does not repeat itself.
_WORDS = [f" {a}{b}" for a in "bdfgklmnprst" for b in ("ar", "el", "ion", "um", "os", "ith")]


@dataclass(frozen=True)
class Pacing:
    """When a token is written: the first, and each further one."""

    ttft_s: float = 0.2
    tpot_s: float = 0.02


@dataclass
class Truth:
    """What was written and when, by the server's own clock."""

    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))


def event(text: str, number: int) -> bytes:
    """A token as one chunk, as vLLM writes it."""
    data = {
        "id": f"chatcmpl-{number:032x}",
        "object": "chat.completion.chunk",
        "created": 1_800_000_000,
        "model": MODEL,
        "choices": [
            {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        ],
    }
    return chunk(b"data: " + json.dumps(data).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    """Frames data as HTTP/1.1 does."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def count_prompt(request: bytes) -> int:
    """Counts a token for each blank of the messages, which come last in our requests."""
    return (request.partition(b'"messages":')[2] or request).count(b" ")


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """The usage, as servers count it."""
    total = prompt_tokens + tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": total}


def last_events(tokens: int, prompt_tokens: int) -> bytes:
    """The end of an answer: why it ended, the usage, [DONE]."""
    end = {"id": "e", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    counted = {"id": "e", "choices": [], "usage": usage(prompt_tokens, tokens)}
    parts = [json.dumps(end), json.dumps(counted), "[DONE]"]
    data = "".join(f"data: {part}\n\n" for part in parts).encode()
    return chunk(data) + b"0\r\n\r\n"


_EVENTS = [event(word, number) for number, word in enumerate(_WORDS)]


class StubConnection(asyncio.Protocol):
    """One connection; a test plants a fault by another `answer`."""

    def __init__(self, pacing: Pacing, truth: Truth) -> None:
        self.pacing, self.truth = pacing, truth
        self.loop = asyncio.get_running_loop()
        self._buffer = b""
        self.prompt_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no child of asyncio's
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Requests follow each other; none comes before the answer to the last."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._buffer, 0, end)
        whole = end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < whole:
            return
        request, self._buffer = self._buffer[:whole], self._buffer[whole:]
        if request.startswith(b"GET"):
            self.answer_get(request)
        else:
            found = _MAX_TOKENS.search(request, end)
            tokens = int(found[1]) if found else 16
            if _STREAM.search(request, end):
                return self.answer(request, tokens)
            # not a stream: only its count of tokens matters, so that it comes at once
            message = {"role": "assistant", "content": _WORDS[0] * tokens}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            body = {"id": "w", "choices": [choice], "usage": usage(count_prompt(request), tokens)}
            self.write_json(b"200 OK", json.dumps(body).encode())

    def answer_get(self, request: bytes) -> None:
        """Answers the list of models and health; anything else is missing."""
        if request.startswith((b"GET /v1/models ", b"GET /health ")):
            self.write_json(b"200 OK", _MODELS)
        else:
            self.write_json(b"404 Not Found", b"{}")

    def write_json(self, status: bytes, body: bytes) -> None:
        """Writes a small answer."""
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)

    def answer(self, request: bytes, tokens: int) -> None:
        """Streams tokens at the known pace."""
        asked = time.monotonic()
        self.prompt_tokens = count_prompt(request)
        self.loop.call_later(self.pacing.ttft_s, self.write_token, asked, 0.0, 0, tokens)

    def write_token(self, asked: float, first: float, number: int, tokens: int) -> None:
        """Writes one token, and plans the next."""
        now = time.monotonic()
        # the place in the list differs by connection, so that answers differ
        data = _EVENTS[(number * 7 + number // len(_EVENTS) + int(asked * 1e6)) % len(_EVENTS)]
        data = data if number else _HEAD + data
        first = first or now
        if number + 1 < tokens:
            self.transport.write(data)
            # counted from the first token: if one is late, the next makes up for it
            due = first + (number + 1) * self.pacing.tpot_s
            delay = max(0.0, due - now)
            self.loop.call_later(delay, self.write_token, asked, first, number + 1, tokens)
        else:
            self.transport.write(data + last_events(tokens, self.prompt_tokens))
            self.truth.ttft.append(first - asked)
            if tokens > 1:
                self.truth.tpot.append((now - first) / (tokens - 1))


async def _main(pacing: Pacing) -> None:
    truth, done, loop = Truth(), asyncio.Event(), asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: StubConnection(pacing, truth), "127.0.0.1", 0, backlog=4096
    )
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)

    def report() -> None:
        means = {"ttft_ms": truth.ttft, "tpot_ms": truth.tpot}
        counts = {name: 1e3 * sum(times) / max(1, len(times)) for name, times in means.items()}
        print(json.dumps(counts), flush=True)
        del truth.ttft[:], truth.tpot[:]

    def obey() -> None:
        # a line asks for what was done since the last; the stub ends with its stdin
        while sys.stdin.buffer.readline():
            loop.call_soon_threadsafe(report)
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=obey, daemon=True).start()
    await done.wait()


if __name__ == "__main__":
    # TTFT and TPOT in seconds
    run_loop(_main(Pacing(*map(float, sys.argv[1:]))))
    os._exit(0)
