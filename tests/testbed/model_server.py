"""A model server for the edge of the network: sound, unless it is told one fault.

It speaks what vLLM, SGLang and llama.cpp speak: /v1/models, /v1/chat/completions, whole and as a
stream, with tools, schemas and logprobs, and /v1/messages. What it answers comes from a small
brain; how it goes wrong is in `model_faults`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pipeline.serving.smoke.client import Gone
from tests.testbed.model_brain import chance, choose_calls, fill, solve
from tests.testbed.model_eye import look_at

MODEL = "brain-1"
_TOKEN = re.compile(r"\s*\S{1,6}|\s+")
_OTHERS = (" the", " of", " and", " river", " zwei")
# Turns of the event loop without a new request, after which all that were sent are there.
_QUIET_TURNS = 15


@dataclass
class Asked:
    """A request, and what a fault may depend on."""

    path: str
    body: dict[str, Any]
    number: int  # of the requests since the start
    load: int  # how many are being answered at the same time
    times: int  # how often this prompt was asked before
    prompts: int  # how many other prompts there were
    prompt_tokens: int
    text: str  # all of the messages
    restarts: int
    is_drafting: bool
    picture: bytes | None  # the last one of the messages

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def tools(self) -> list[Any]:
        return list(self.body.get("tools") or [])

    @property
    def thinks(self) -> bool:
        return bool((self.body.get("chat_template_kwargs") or {}).get("enable_thinking", True))


@dataclass
class Token:
    """A token and its probability; `others` could have been chosen."""

    text: str
    logprob: float
    others: list[tuple[str, float]]


@dataclass
class Reply:
    """An answer before it is written down."""

    text: str
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    model: str = MODEL
    tokens: list[Token] = field(default_factory=list)
    written: list[Token] = field(default_factory=list)  # with marks that a parser took out
    prompt_tokens: int = 0
    completion_tokens: int = 0
    content_is_null: bool = False


class Refusal(Exception):
    """A status instead of an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _nothing(*_: Any) -> None:
    return None


def _same(_: Asked, value: Any) -> Any:
    return value


def _draft_counts(_: Asked) -> str:
    """As vLLM counts them."""
    return (
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 300.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 210.0\n'
    )


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"text": str(content or "")}]


def _decoded(url: str) -> bytes:
    return base64.b64decode(url.partition("base64,")[2])


@dataclass(frozen=True)
class Fault:
    """One way to go wrong, and the rung that should see it. All else stays as it is."""

    name: str = "none"
    rung: str = ""
    asked: Callable[[Asked], None] = _nothing  # may raise a Refusal
    text: Callable[[Asked, str], str] = _same  # what the brain said
    reply: Callable[[Asked, Reply], None] = _nothing
    body: Callable[[Asked, dict[str, Any]], dict[str, Any]] = _same
    chunks: Callable[[Asked, list[Any]], list[Any]] = _same
    raw: Callable[[Asked, bytes], bytes] = _same
    metrics: Callable[[Asked], str] = _draft_counts
    delay_s: Callable[[Asked], float] = lambda _: 0.0
    # `reasoning`, `restart`, `baseline`, `drafts`, `vision` or `no logprobs`
    needs: str = ""
    starts_drafting: bool = True


def tokenize(text: str) -> list[str]:
    """Words and parts of words."""
    return _TOKEN.findall(text)


@lru_cache(maxsize=1000)
def _known_tokens(text: str) -> list[Token]:
    tokens = []
    for place, part in enumerate(tokenize(text)):
        dice = chance(text[:40], place) % 1000 / 10000
        others = [(o, -3.0 - n - dice) for n, o in enumerate(_OTHERS) if o != part][:4]
        tokens.append(Token(part, -0.01 - dice, others))
    return tokens


class ModelServer:
    """Answers requests; told one fault at most."""

    def __init__(
        self,
        fault: Fault | None = None,
        *,
        context: int = 2048,
        reasons: bool = False,
        has_ties: bool = False,
        delay_s: float = 0.0,
        has_logprobs: bool = True,
        can_count_only: bool = False,
        is_drafting: bool = False,
    ) -> None:
        self.fault, self.context = fault or Fault(), context
        self.reasons, self.has_ties, self.delay_s = reasons, has_ties, delay_s
        self.has_logprobs, self.can_count_only = has_logprobs, can_count_only
        self.is_drafting = is_drafting
        self.requests = self.active = self.restarts = 0
        self.seen: dict[str, int] = {}

    async def restart(self) -> None:
        """What a restart leaves: files of a cache on disk, so the server knows that it was one."""
        self.restarts += 1

    async def start_drafting(self) -> None:
        """The same engine with a draft model, or none that comes up."""
        if not self.fault.starts_drafting:
            raise Gone("the engine ended (1): no memory is left for the draft model")
        self.is_drafting = True

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one connection."""
        self.active += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            length = re.search(r"content-length: (\d+)", head, re.I)
            data = await reader.readexactly(int(length[1]) if length else 0)
            writer.write(await self._answer(method, path, data))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.active -= 1
            writer.close()

    async def _answer(self, method: str, path: str, data: bytes) -> bytes:
        load = await self._settled()
        asked = self._asked(path, json.loads(data) if data else {}, load)
        try:
            await asyncio.sleep(self.delay_s + self.fault.delay_s(asked))
            self.fault.asked(asked)
            if asked.path == "/metrics" and self.is_drafting:
                return _http(200, self.fault.metrics(asked).encode(), "text/plain")
            if method == "GET":
                return self.fault.raw(asked, _http(200, json.dumps(self._got(asked)).encode()))
            if asked.prompt_tokens >= self.context:
                raise Refusal(400, "the prompt is longer than the context")
            return self.fault.raw(asked, self._written(asked))
        except Refusal as error:
            body = json.dumps({"error": {"message": str(error)}}).encode()
            return _http(error.status, body)

    async def _settled(self) -> int:
        """How many requests are there once no more come."""
        quiet, before = 0, self.active
        while quiet < _QUIET_TURNS:
            await asyncio.sleep(0)
            quiet, before = (quiet + 1, before) if self.active == before else (0, self.active)
        return self.active

    def _asked(self, path: str, body: dict[str, Any], load: int) -> Asked:
        self.requests += 1
        parts = [part for m in body.get("messages", []) for part in _parts(m)]
        text = "\n".join(part["text"] for part in parts if "text" in part)
        pictures = [part["image_url"]["url"] for part in parts if "image_url" in part]
        times = self.seen.get(text, 0)
        self.seen[text] = times + 1
        return Asked(
            path=path,
            body=body,
            number=self.requests,
            load=load,
            times=times,
            prompts=len(self.seen),
            prompt_tokens=len(tokenize(text)) + 4 * len(body.get("messages", [])),
            text=text,
            restarts=self.restarts,
            is_drafting=self.is_drafting,
            picture=_decoded(pictures[-1]) if pictures else None,
        )

    def _got(self, asked: Asked) -> Any:
        if asked.path == "/health":
            return {"status": "ok"}
        if asked.path == "/v1/models":
            models = [{"id": MODEL, "object": "model", "max_model_len": self.context}]
            return self.fault.body(asked, {"object": "list", "data": models})
        raise Refusal(404, "there is no such page")

    def _written(self, asked: Asked) -> bytes:
        if asked.path == "/v1/messages":
            return _messages(asked, self.fault, self.think(asked))
        if asked.path != "/v1/chat/completions":
            raise Refusal(404, "there is no such page")
        if asked.body.get("logprobs") and not self.has_logprobs:
            raise Refusal(400, "logprobs are not supported")
        reply = self.think(asked)
        if asked.is_stream:
            chunks = self.fault.chunks(asked, _chunks(asked, reply))
            return _http(200, b"".join(map(_event, chunks)), "text/event-stream")
        body = self.fault.body(asked, _whole(asked, reply))
        return _http(200, json.dumps(body, ensure_ascii=False).encode())

    def think(self, asked: Asked) -> Reply:
        """What the brain says, as tokens, within the limit."""
        reply = self._thought(asked)
        reply.text = self.fault.text(asked, reply.text)
        reply.tokens = self._tokens(asked, reply.text)
        reply.prompt_tokens = asked.prompt_tokens
        _cut(reply, asked.body)
        thought = len(tokenize(reply.reasoning)) + sum(len(str(c)) for c in reply.calls)
        reply.completion_tokens = len(reply.tokens) + thought
        self.fault.reply(asked, reply)
        return reply

    def _thought(self, asked: Asked) -> Reply:
        messages = asked.body["messages"]
        last, text = messages[-1], asked.text
        if self.can_count_only:
            return Reply(" ".join(str(n % 16) for n in range(100)))
        if last["role"] == "tool":
            return Reply(f"The tool says: {last['content']}.")
        if asked.picture is not None:
            return Reply(look_at(asked.picture, text))
        if calls := choose_calls(asked.tools, text):
            return Reply("", calls=_calls(asked, calls), finish="tool_calls")
        wanted = asked.body.get("response_format") or {}
        if wanted.get("type") == "json_schema":
            value = fill(wanted["json_schema"]["schema"], text)
            return Reply(json.dumps(value, ensure_ascii=False))
        greedy = not asked.body.get("temperature", 1)
        reply = Reply(solve(text, 0 if greedy else asked.body.get("seed", asked.number)))
        if self.reasons and asked.thinks and asked.path != "/v1/messages":
            reply.reasoning = "Let me think about it carefully. "
        return reply

    def _tokens(self, asked: Asked, text: str) -> list[Token]:
        tokens = [Token(t.text, t.logprob, list(t.others)) for t in _known_tokens(text)]
        if self.has_ties and len(tokens) > 8 and text[0].isdigit():
            # two openings that are equally probable: which one wins depends on the batch
            openings = ("So: ", "OK: ")
            if asked.load > 1 and asked.number % 3 == 0:
                openings = openings[::-1]
            tokens.insert(0, Token(openings[0], -0.7, [(openings[1], -0.7), *tokens[0].others[:3]]))
        return tokens


def _calls(asked: Asked, chosen: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    calls = []
    for number, (name, arguments) in enumerate(chosen):
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        call_id = f"call-{asked.number}-{number}"
        calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _cut(reply: Reply, body: dict[str, Any]) -> None:
    """Stop words, then the limit."""
    text = "".join(t.text for t in reply.tokens)
    for word in body.get("stop") or []:
        while word in text:
            reply.tokens.pop()
            text = "".join(t.text for t in reply.tokens)
    most = body.get("max_tokens") or 10_000
    if len(reply.tokens) > most:
        reply.tokens, reply.finish = reply.tokens[:most], "length"
    reply.text = "".join(t.text for t in reply.tokens)


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": t.text,
                "logprob": t.logprob,
                "top_logprobs": [
                    {"token": o, "logprob": p} for o, p in [(t.text, t.logprob), *t.others]
                ],
            }
            for t in tokens
        ]
    }


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.completion_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": total,
    }


def _whole(asked: Asked, reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message |= {"content": None, "tool_calls": reply.calls}
    if reply.content_is_null:
        message["content"] = None
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reply.finish}
    if asked.body.get("logprobs"):
        choice["logprobs"] = _logprobs(reply.written or reply.tokens)
    return {"model": reply.model, "choices": [choice], "usage": _usage(reply)}


def _chunks(asked: Asked, reply: Reply) -> list[Any]:
    """The answer as chunks: reasoning, then text token by token, then calls in pieces."""
    deltas: list[tuple[dict[str, Any], Any]] = []
    deltas += [({"reasoning_content": t}, None) for t in tokenize(reply.reasoning)]
    deltas += [({"content": t.text}, _logprobs([t])) for t in reply.tokens]
    for index, call in enumerate(reply.calls):
        function = call["function"]
        first = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        deltas.append(({"tool_calls": [first]}, None))
        for piece in re.findall(r"(?s).{1,7}", function["arguments"]):
            part = {"index": index, "function": {"arguments": piece}}
            deltas.append(({"tool_calls": [part]}, None))
    chunks: list[Any] = []
    for delta, logprobs in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        if asked.body.get("logprobs"):
            choice["logprobs"] = logprobs
        chunks.append({"model": reply.model, "choices": [choice]})
    end = {"index": 0, "delta": {}, "finish_reason": reply.finish}
    chunks.append({"model": reply.model, "choices": [end]})
    chunks.append({"model": reply.model, "choices": [], "usage": _usage(reply)})
    return [*chunks, b"data: [DONE]\n\n"]


def _event(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _messages(asked: Asked, fault: Fault, reply: Reply) -> bytes:
    stop = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish]
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    if not asked.is_stream:
        block = [{"type": "text", "text": reply.text}]
        body = {"type": "message", "content": block, "stop_reason": stop, "usage": usage}
        return _http(200, json.dumps(fault.body(asked, body), ensure_ascii=False).encode())
    deltas: list[Any] = [
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": t.text}}
        for t in reply.tokens
    ]
    events = fault.chunks(asked, [*deltas, {"type": "message_stop"}])
    return _http(200, b"".join(map(_event, events)), "text/event-stream")


def _http(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def listening(server: ModelServer) -> AsyncIterator[str]:
    """The server's address, in this event loop."""
    running = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=512)
    try:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"
    finally:
        running.close()
        await running.wait_closed()
