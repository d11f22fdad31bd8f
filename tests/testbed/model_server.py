"""A model server for the edge of the network: sound, unless it is told one fault.

It speaks what vLLM, SGLang and llama.cpp speak: /v1/models, /v1/chat/completions, whole and as a
stream, with tools, schemas and logprobs, /v1/messages and /v1/responses. What it answers comes from
a small brain; how it goes wrong is in `model_faults`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any
from zlib import crc32

from pipeline.serving.smoke.client import Gone
from tests.testbed.model_brain import chance, choose_calls, fill, solve
from tests.testbed.model_eye import look_at

MODEL = "brain-1"
COUNT_TOKENS = "/v1/messages/count_tokens"
_TOKEN = re.compile(r"\s*\S{1,6}|\s+")
_OTHERS = (" the", " of", " and", " river", " zwei")
# Turns of the event loop without a new request, after which all that were sent are there.
_QUIET_TURNS = 15
_PART_BYTES = 4096  # of a stream, written at once
# made once: `json.dumps` makes one for each of a stream's many events
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)
_BLOCK = 64  # characters of a prompt that are kept together


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
    cached_tokens: int = 0  # of a prompt that began like an earlier one
    connection: int = 0  # a number for each
    reuses: int = 0  # requests that the connection carried before
    cancels: int = 0  # answers that clients did not wait for
    aborted: str = ""  # what the last of them would have read

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def tools(self) -> list[Any]:
        """In the form of chat completions; the other endpoints write them flat.

        Those that have no schema are the server's own, such as Codex's web search.
        """
        flat = [t for t in self.body.get("tools") or [] if "input_schema" in t or "parameters" in t]
        return [t for t in self.body.get("tools") or [] if "function" in t] + [
            {"function": {**t, "parameters": t.get("input_schema") or t.get("parameters")}}
            for t in flat
        ]

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
    id: str = ""
    cached_tokens: int | None = None  # none: the server does not say
    choices: int = 1


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


def _said(content: Any) -> str:
    """A text, or the texts of its blocks: what a tool said may be either."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _as_chat(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The request of another endpoint with the messages of chat completions."""
    given = body.get("input", body.get("messages", []))
    first = body.get("instructions", body.get("system"))
    messages = [{"role": "system", "content": first}] if first else []
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        content, kind = item.get("content"), item.get("type", "message")
        blocks = content if isinstance(content, list) else []
        results = [b for b in blocks if b.get("type") == "tool_result"]
        if kind == "function_call_output":
            messages.append({"role": "tool", "content": _said(item["output"])})
        elif kind == "function_call":
            messages.append({"role": "assistant", "content": ""})
        elif results:
            messages += [{"role": "tool", "content": _said(b.get("content"))} for b in results]
        elif kind == "message":
            # Codex's name for it
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({**item, "role": role})
        elif kind != "reasoning":
            raise Refusal(400, f"there is no item of type {kind!r}")
    most = {"max_tokens": n} if (n := body.get("max_output_tokens")) else {}
    return {**body, "messages": messages, **most}


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
    is_kept: Callable[[Asked], bool] = lambda _: True  # whether prompts are kept for later ones
    # `reasoning`, `restart`, `baseline`, `drafts`, `vision` or `no logprobs`
    needs: str = ""
    starts_drafting: bool = True
    cuts_prompts: bool = False  # what is longer than the context is cut, not refused
    memory_bytes: Callable[[Asked], float] = lambda _: 2e9


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
        self.requests = self.active = self.restarts = self.connections = self.cancels = 0
        self.seen: dict[str, int] = {}
        self.kept: set[int] = set()  # beginnings of prompts, block by block
        self.aborted = ""

    async def restart(self) -> None:
        """What a restart leaves: files of a cache on disk, so the server knows that it was one."""
        self.restarts += 1

    async def start_drafting(self) -> None:
        """The same engine with a draft model, or none that comes up."""
        if not self.fault.starts_drafting:
            raise Gone("the engine ended (1): no memory is left for the draft model")
        self.is_drafting = True

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, in turn."""
        self.connections += 1
        place, reuses = (self.connections, 0), 0
        self.active += 1
        is_active = True
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.active += not is_active
                is_active = True
                method, path, _ = head.split(" ", 2)
                path = path.partition("?")[0]  # Claude Code asks for /v1/messages?beta=true
                length = re.search(r"content-length: (\d+)", head, re.I)
                data = await reader.readexactly(int(length[1]) if length else 0)
                answer = await self._answer(method, path, data, (place[0], reuses))
                await self._write(reader, writer, answer)
                self.active -= 1
                is_active = False
                reuses += 1
                ends = b"HTTP/1.0" in answer[:8] or b"Connection: close" in answer[:300]
                if ends or re.search("connection: close", head, re.I):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.active -= is_active
            with suppress(RuntimeError):  # where the loop ended while a client was still connected
                writer.close()

    async def _write(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes
    ) -> None:
        """Long streams in parts, so that a client can hang up in between."""
        if len(answer) < _PART_BYTES or b"text/event-stream" not in answer[:200]:
            writer.write(answer)
            return await writer.drain()
        for at in range(0, len(answer), _PART_BYTES):
            writer.write(answer[at : at + _PART_BYTES])
            await writer.drain()
            for _ in range(4):
                await asyncio.sleep(0)
            if reader.at_eof():
                self.cancels += 1
                rest = re.findall(rb'"content": "([^"]*)"', answer[at + _PART_BYTES :])
                self.aborted = b"".join(rest).decode()
                raise ConnectionResetError

    async def _answer(
        self, method: str, path: str, data: bytes, place: tuple[int, int] = (0, 0)
    ) -> bytes:
        load = await self._settled()
        try:
            asked = self._asked(path, json.loads(data) if data else {}, load)
            asked.connection, asked.reuses = place
            asked.cancels, asked.aborted = self.cancels, self.aborted
            await asyncio.sleep(self.delay_s + self.fault.delay_s(asked))
            self.fault.asked(asked)
            if asked.path == "/metrics":
                drafts = self.fault.metrics(asked) if self.is_drafting else ""
                memory = f"process_resident_memory_bytes {self.fault.memory_bytes(asked):g}\n"
                return _http(200, (memory + drafts).encode(), "text/plain")
            if method == "GET":
                return self.fault.raw(asked, _http(200, json.dumps(self._got(asked)).encode()))
            if asked.prompt_tokens >= self.context and not self.fault.cuts_prompts:
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
        if path in ("/v1/messages", COUNT_TOKENS, "/v1/responses"):
            body = _as_chat(path, body)
        parts = [part for m in body.get("messages", []) for part in _parts(m)]
        text = "\n".join(part["text"] for part in parts if "text" in part)
        pictures = [part["image_url"]["url"] for part in parts if "image_url" in part]
        times = self.seen.get(text, 0)
        self.seen[text] = times + 1
        blocks = [0]
        for at in range(0, len(text) - _BLOCK, _BLOCK):
            blocks.append(crc32(text[at : at + _BLOCK].encode(), blocks[-1]))
        hits = list(takewhile(self.kept.__contains__, blocks[1:]))
        prompt_tokens = len(tokenize(text)) + 4 * len(body.get("messages", []))
        asked = Asked(
            path=path,
            body=body,
            number=self.requests,
            load=load,
            times=times,
            prompts=len(self.seen),
            prompt_tokens=prompt_tokens,
            text=text,
            restarts=self.restarts,
            is_drafting=self.is_drafting,
            picture=_decoded(pictures[-1]) if pictures else None,
            cached_tokens=prompt_tokens * len(hits) * _BLOCK // max(1, len(text)),
        )
        if self.fault.is_kept(asked):
            self.kept.update(blocks[1:])
        return asked

    def _got(self, asked: Asked) -> Any:
        if asked.path == "/health":
            return {"status": "ok"}
        if asked.path == "/v1/models":
            models = [{"id": MODEL, "object": "model", "max_model_len": self.context}]
            return self.fault.body(asked, {"object": "list", "data": models})
        raise Refusal(404, "there is no such page")

    def _written(self, asked: Asked) -> bytes:
        if asked.path == COUNT_TOKENS:
            count = self.fault.body(asked, {"input_tokens": asked.prompt_tokens})
            return _http(200, json.dumps(count).encode())
        if asked.path == "/v1/messages":
            return _messages(asked, self.fault, self.think(asked))
        if asked.path == "/v1/responses":
            return _responses(asked, self.fault, self.think(asked))
        if asked.path != "/v1/chat/completions":
            raise Refusal(404, "there is no such page")
        if asked.body.get("logprobs") and not self.has_logprobs:
            raise Refusal(400, "logprobs are not supported")
        several = range(asked.body.get("n") or 1)
        replies = [self.think(replace(asked, number=asked.number + 1000 * k)) for k in several]
        reply = replies[0]
        if asked.is_stream:
            more = [c for k in several[1:] for c in _chunks(asked, replies[k], k)[:-2]]
            chunks = self.fault.chunks(asked, [*more, *_chunks(asked, reply)])
            return _http(200, b"".join(map(_event, chunks)), "text/event-stream")
        body = _whole(asked, reply)
        for k in several[1:]:
            body["choices"].append({**_whole(asked, replies[k])["choices"][0], "index": k})
        body = self.fault.body(asked, body)
        return _http(200, json.dumps(body, ensure_ascii=False).encode())

    def think(self, asked: Asked) -> Reply:
        """What the brain says, as tokens, within the limit."""
        reply = self._thought(asked)
        reply.text = self.fault.text(asked, reply.text)
        reply.tokens = self._tokens(asked, reply.text)
        reply.prompt_tokens, reply.id = asked.prompt_tokens, f"answer-{asked.number}"
        reply.cached_tokens = min(asked.cached_tokens, asked.prompt_tokens - 1)
        _cut(reply, asked.body)
        thought = len(tokenize(reply.reasoning)) + sum(len(tokenize(str(c))) for c in reply.calls)
        reply.completion_tokens = len(reply.tokens) + thought
        self.fault.reply(asked, reply)
        return reply

    def _thought(self, asked: Asked) -> Reply:
        messages, text = asked.body["messages"], asked.text
        # agents put a system turn behind what is asked
        last = [m for m in messages if m["role"] != "system"][-1]
        if self.can_count_only:
            return Reply(" ".join(str(n % 16) for n in range(100)))
        if last["role"] == "tool":
            return Reply(f"The tool says: {last['content']}.")
        if asked.picture is not None:
            return Reply(look_at(asked.picture, text))
        said = "\n".join(part.get("text", "") for part in _parts(last))
        if calls := choose_calls(asked.tools, said):
            is_agent = self.reasons and asked.path != "/v1/chat/completions"
            thought = "I need a tool for that. " if is_agent else ""
            made = _calls(asked, calls)
            return Reply("", reasoning=thought, calls=made, finish="tool_calls")
        wanted = asked.body.get("response_format") or {}
        if wanted.get("type") == "json_schema":
            value = fill(wanted["json_schema"]["schema"], text)
            return Reply(json.dumps(value, ensure_ascii=False))
        greedy = not asked.body.get("temperature", 1)
        reply = Reply(solve(text, 0 if greedy else asked.body.get("seed", asked.number)))
        if self.reasons and asked.thinks:
            reply.reasoning = "Let me think about it carefully. "
        return reply

    def _tokens(self, asked: Asked, text: str) -> list[Token]:
        tokens = [Token(t.text, t.logprob, list(t.others)) for t in _known_tokens(text)]
        if "Invent" in asked.text and not self.can_count_only:
            # many words are as good: what is chosen at a high temperature differs each time
            for token in tokens:
                token.logprob = -1.5
                token.others = [(o, -1.6 - n / 10) for n, (o, _) in enumerate(token.others)]
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


def _usage(reply: Reply) -> dict[str, Any]:
    total = reply.prompt_tokens + reply.completion_tokens
    cached = reply.cached_tokens
    return {
        **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}),
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
    head = {"id": reply.id, "object": "chat.completion", "model": reply.model}
    return {**head, "choices": [choice], "usage": _usage(reply)}


def _chunks(asked: Asked, reply: Reply, place: int = 0) -> list[Any]:
    """The answer as chunks: reasoning, then text token by token, then calls in pieces."""
    deltas: list[tuple[dict[str, Any], Any]] = []
    deltas += [({"reasoning_content": t}, None) for t in tokenize(reply.reasoning)]
    has_logprobs = bool(asked.body.get("logprobs"))
    deltas += [({"content": t.text}, has_logprobs and _logprobs([t])) for t in reply.tokens]
    for index, call in enumerate(reply.calls):
        function = call["function"]
        first = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        deltas.append(({"tool_calls": [first]}, None))
        for piece in re.findall(r"(?s).{1,7}", function["arguments"]):
            part = {"index": index, "function": {"arguments": piece}}
            deltas.append(({"tool_calls": [part]}, None))
    chunks: list[Any] = []
    head = {"id": reply.id, "object": "chat.completion.chunk", "model": reply.model}
    for delta, logprobs in deltas:
        choice = {"index": place, "delta": delta, "finish_reason": None}
        if asked.body.get("logprobs"):
            choice["logprobs"] = logprobs
        chunks.append({**head, "choices": [choice]})
    end = {"index": place, "delta": {}, "finish_reason": reply.finish}
    chunks.append({**head, "choices": [end]})
    chunks.append({**head, "choices": [], "usage": _usage(reply)})
    return [*chunks, b"data: [DONE]\n\n"]


def _event(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return b"data: " + _ENCODER.encode(value).encode() + b"\n\n"


def _named_event(value: Any) -> bytes:
    """With the name of the event, by which Anthropic's clients tell them apart."""
    if isinstance(value, bytes):
        return value
    return f"event: {value['type']}\n".encode() + _event(value)


def _messages(asked: Asked, fault: Fault, reply: Reply) -> bytes:
    """As Anthropic's API writes them."""
    stop = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish]
    cached = reply.cached_tokens or 0
    usage = {"input_tokens": reply.prompt_tokens - cached, "output_tokens": reply.completion_tokens}
    if reply.cached_tokens is not None:
        usage["cache_read_input_tokens"] = cached
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "brain"})
    blocks += [{"type": "text", "text": reply.text}] if reply.text else []
    for call in reply.calls:
        function = call["function"]
        used = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**used, "input": json.loads(function["arguments"])})
    head = {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model}
    if not asked.is_stream:
        body = {**head, "content": blocks, "stop_reason": stop, "usage": usage}
        return _http(200, json.dumps(fault.body(asked, body), ensure_ascii=False).encode())
    start: dict[str, Any] = {**head, "content": [], "stop_reason": None, "usage": usage}
    events: list[Any] = [{"type": "message_start", "message": start}]
    for place, block in enumerate(blocks):
        kinds: dict[str, Any] = {"text": "", "thinking": "", "signature": "", "input": {}}
        empty = {key: value for key, value in kinds.items() if key in block}
        at = {"index": place}
        events.append({"type": "content_block_start", **at, "content_block": {**block, **empty}})
        if block["type"] == "text":
            deltas = [{"type": "text_delta", "text": t.text} for t in reply.tokens]
        elif block["type"] == "thinking":
            words = tokenize(block["thinking"])
            deltas = [{"type": "thinking_delta", "thinking": word} for word in words]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            text = json.dumps(block["input"], ensure_ascii=False)
            pieces = re.findall(r"(?s).{1,7}", text)
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        events += [{"type": "content_block_delta", **at, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", **at})
    events.append({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": usage})
    events = fault.chunks(asked, [*events, {"type": "message_stop"}])
    return _http(200, b"".join(map(_named_event, events)), "text/event-stream")


def _responses(asked: Asked, fault: Fault, reply: Reply) -> bytes:
    """As OpenAI's newer API writes them, which Codex speaks."""
    usage: dict[str, Any] = {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    if reply.cached_tokens is not None:
        usage["input_tokens_details"] = {"cached_tokens": reply.cached_tokens}
    output: list[dict[str, Any]] = []
    if reply.reasoning:
        thought = [{"type": "summary_text", "text": reply.reasoning}]
        output.append({"type": "reasoning", "id": f"rs-{asked.number}", "summary": thought})
        if "reasoning.encrypted_content" in asked.body.get("include", []):
            output[0]["encrypted_content"] = "brain"
    if reply.text:
        content = [{"type": "output_text", "text": reply.text, "annotations": []}]
        output.append({"type": "message", "role": "assistant", "content": content})
    for call in reply.calls:
        output.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    is_cut = reply.finish == "length"
    body = {
        "id": reply.id,
        "object": "response",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": reply.model,
        "output": output,
        "usage": usage,
    }
    if not asked.is_stream:
        return _http(200, json.dumps(fault.body(asked, body), ensure_ascii=False).encode())
    events: list[Any] = [{"type": "response.created", "response": {**body, "output": []}}]
    for place, item in enumerate(output):
        at = {"output_index": place}
        empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        if item["type"] == "reasoning":
            events.append({"type": "response.output_item.done", **at, "item": item})
            continue
        added = {**item, **empty}
        events.append({"type": "response.output_item.added", **at, "item": added})
        if item["type"] == "message":
            kind, deltas = "response.output_text", [t.text for t in reply.tokens]
        else:
            kind = "response.function_call_arguments"
            deltas = re.findall(r"(?s).{1,7}", item["arguments"])
        events += [{"type": f"{kind}.delta", **at, "delta": delta} for delta in deltas]
        events.append({"type": "response.output_item.done", **at, "item": item})
    end = "response.incomplete" if is_cut else "response.completed"
    events = fault.chunks(asked, [*events, {"type": end, "response": body}])
    return _http(200, b"".join(map(_named_event, events)), "text/event-stream")


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
        # since Python 3.12 it waits for connections, and a fault may hold one for ever
        with suppress(TimeoutError):
            async with asyncio.timeout(2):
                await running.wait_closed()


@contextmanager
def in_thread(server: Any) -> Iterator[str]:
    """The address of a server with a `handle`, which runs in a thread of its own."""
    address: list[str] = []
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with listening(server) as url:
            address.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
