"""Sound servers with manners of their own, as engines and what stands before them have them.

None of them is wrong: a ladder that blames one of them is.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from tests.testbed.model_server import (
    MODEL,
    Asked,
    Fault,
    ModelServer,
    Refusal,
    Reply,
    Token,
)


def _with_body(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    head, _, body = data.partition(b"\r\n\r\n")
    body = change(body)
    return re.sub(rb"Length: \d+", b"Length: %d" % len(body), head) + b"\r\n\r\n" + body


def _refuse(condition: Callable[[Asked], bool], status: int) -> Callable[[Asked], None]:
    def asked(request: Asked) -> None:
        if condition(request):
            raise Refusal(status, "not supported here")

    return asked


def _is_chat(asked: Asked) -> bool:
    return asked.path == "/v1/chat/completions"


def _vllm_models(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
    """Two names of one model, of which the first answers; and `reasoning` for reasoning."""
    if asked.path == "/v1/models":
        cards = [{"id": name, "root": "/models/m"} for name in ("alias", MODEL)]
        return {**body, "data": [{**card, "max_model_len": 2048} for card in cards]}
    for choice in body.get("choices", []):
        message = choice["message"]
        message["reasoning"] = message.pop("reasoning_content", None)
    return body


def _vllm_chunks(asked: Asked, chunks: list[Any]) -> list[Any]:
    """First a role alone; in /v1/messages a start and a ping, and [DONE] behind the end."""
    if not _is_chat(asked):
        start = [{"type": "message_start", "message": {}}, {"type": "ping"}]
        return [*start, *chunks, b"data: [DONE]\n\n"]
    for chunk in chunks:
        for choice in chunk.get("choices", []) if isinstance(chunk, dict) else []:
            delta = choice["delta"]
            if "reasoning_content" in delta:
                choice["delta"] = {"reasoning": delta["reasoning_content"], "content": None}
    delta = {"role": "assistant", "content": ""}
    first = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return [{"model": MODEL, "choices": [first], "usage": None}, *chunks]


def _sglang_body(_: Asked, body: dict[str, Any]) -> dict[str, Any]:
    """Calls of a whole answer have a place that is null."""
    for choice in body.get("choices", []):
        for call in choice["message"].get("tool_calls") or []:
            call["index"] = None
    return body


def _sglang_chunks(asked: Asked, chunks: list[Any]) -> list[Any]:
    """Calls whole, without a place; empty deltas; the end and the counts in the last delta."""
    if not _is_chat(asked):
        return chunks
    kept: list[Any] = []
    for chunk in chunks[:-3]:
        calls = chunk["choices"][0]["delta"].get("tool_calls")
        if calls and "id" not in calls[0]:
            before = kept[-1]["choices"][0]["delta"]["tool_calls"][0]["function"]
            before["arguments"] += calls[0]["function"]["arguments"]
            continue
        for call in calls or []:
            call["index"] = None
        empty = {"index": 0, "delta": {"content": "", "tool_calls": []}, "finish_reason": None}
        kept += [{"model": MODEL, "choices": [empty], "error": None}, chunk]
    kept[-1]["choices"][0]["finish_reason"] = chunks[-3]["choices"][0]["finish_reason"]
    kept[-1]["usage"] = chunks[-2]["usage"]
    return [*kept, chunks[-1]]


def _word_of_health(asked: Asked, data: bytes) -> bytes:
    return _with_body(data, lambda _: b"OK\n") if asked.path == "/health" else data


def _no_content_of_health(asked: Asked, data: bytes) -> bytes:
    return b"HTTP/1.1 204 No Content\r\n\r\n" if asked.path == "/health" else data


def _nameless_context(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
    if asked.path == "/v1/models":
        body["data"][0].pop("max_model_len")
    return body


def _no_counts_in_streams(asked: Asked, chunks: list[Any]) -> list[Any]:
    return [c for c in chunks if isinstance(c, bytes) or "type" in c or not c.get("usage")]


def _pinging(_: Asked, chunks: list[Any]) -> list[Any]:
    """Comments between events, and each event in several lines of data."""
    events = []
    for chunk in chunks:
        if isinstance(chunk, bytes):
            events.append(chunk)
            continue
        lines = json.dumps(chunk, ensure_ascii=False, indent=1).split("\n")
        data = "".join(f"data: {line}\n" for line in lines)
        # the name may follow the data
        name = f"event: {chunk['type']}\n" if "type" in chunk else ""
        events.append(f"id: 1\n{data}{name}\n".encode())
    return [part for event in events for part in (b": ping\n\n", event)]


def _crlf(asked: Asked, data: bytes) -> bytes:
    return _with_body(data, lambda b: b.replace(b"\n", b"\r\n")) if asked.is_stream else data


def _old_http(asked: Asked, data: bytes) -> bytes:
    """HTTP/1.0: the end of the connection is the end of the answer."""
    head, _, body = _crlf(asked, data).partition(b"\r\n\r\n")
    return re.sub(rb"\r\nContent-Length: \d+", b"", head).replace(b"/1.1", b"/1.0") + (
        b"\r\n\r\n" + body
    )


def _small_chunks(asked: Asked, data: bytes) -> bytes:
    """Three bytes at a time, across lines and characters."""
    head, _, body = data.partition(b"\r\n\r\n")
    pieces = [body[i : i + 3] for i in range(0, len(body), 3)]
    chunks = b"".join(b"%x;n=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    named = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: Chunked", head)
    return named + b"\r\n\r\n" + chunks + b"0\r\nX-Trailer: 1\r\n\r\n"


def _knows_little(asked: Asked) -> None:
    """No schemas, no seeds, no system prompts; 422, as FastAPI refuses a field."""
    roles = [m["role"] for m in asked.body.get("messages", [])]
    if "response_format" in asked.body or "seed" in asked.body or "system" in roles:
        raise Refusal(422, "not supported here")


def _small_room(asked: Asked) -> None:
    if asked.body.get("max_tokens", 0) >= 1024:
        raise Refusal(400, "max_tokens is larger than the context")


class BusyServer(ModelServer):
    """Takes so many at once, and asks the others to come again."""

    most = 16

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.active < self.most:
            return await super().handle(reader, writer)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.I)
        await reader.readexactly(int(length[1]) if length else 0)
        writer.write(b"HTTP/1.1 429 X\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()


class EndingServer(ModelServer):
    """A full stop behind numbers, or none: equally probable, and the batch decides."""

    def _tokens(self, asked: Asked, text: str) -> list[Token]:
        tokens = super()._tokens(asked, text)
        if len(tokens) > 8 and text[0].isdigit() and not (asked.load > 1 and asked.number % 3 == 0):
            tokens.append(Token(".", -0.69, [("<|im_end|>", -0.70), (" the", -6.0)]))
        return tokens


class ThinkingServer(ModelServer):
    """Thinks whatever it is asked, in one of two wordings; logprobs have the marks around it."""

    def _thought(self, asked: Asked) -> Reply:
        reply = super()._thought(asked)
        word = "So" if asked.load > 1 and asked.number % 2 else "OK"
        if not reply.calls and _is_chat(asked):
            reply.reasoning = f"Let me think about it. {word}: easy, I know this one by heart. "
        return reply

    def think(self, asked: Asked) -> Reply:
        """All that is written counts: marks, reasoning, content."""
        reply = super().think(asked)
        if not reply.reasoning:
            return reply
        written = [Token("<think>", -0.1, [("x", -3.0)])]
        for word in re.findall(r"\s*\S+|\s+", reply.reasoning):
            other = {" So:": " OK:", " OK:": " So:"}.get(word)
            rest = [(other, -0.70)] if other else [(" zz", -5.0)]
            written.append(Token(word, -0.69 if other else -0.01, rest))
        written.append(Token("</think>\n\n", -0.1, [("x", -3.0)]))
        return _cut_thought(reply, written, asked.body.get("max_tokens", 10_000))


def _cut_thought(reply: Reply, thought: list[Token], most: int) -> Reply:
    """Marks, reasoning and content within the limit."""
    written = [*thought, *reply.tokens]
    if len(written) > most:
        written, reply.finish = written[:most], "length"
    before, mark, text = "".join(t.text for t in written).partition("</think>\n\n")
    reply.reasoning, reply.text = before.removeprefix("<think>"), text
    reply.content_is_null = not mark
    reply.tokens, reply.written = written[len(thought) :], written
    reply.completion_tokens = len(written)
    return reply


def small_room_server() -> ModelServer:
    """Refuses a limit that is larger than what it holds, as vLLM does."""
    return ModelServer(Fault(asked=_small_room), context=1024, reasons=True)


def _marked(asked: Asked, data: bytes) -> bytes:
    """A byte order mark before everything."""
    return _with_body(data, lambda body: b"\xef\xbb\xbf" + body)


def _with_fractions(_: Asked, reply: Reply) -> None:
    """Integers as some JSON writers have them: 40.0."""
    for call in reply.calls:
        text = call["function"]["arguments"]
        call["function"]["arguments"] = re.sub(r": (\d+)(?=[,}])", r": \1.0", text)


def _nameless(asked: Asked, value: Any) -> Any:
    """No ids, no kinds, no details of the usage."""
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict) and "choices" in part:
            part.pop("id", None)
            part.pop("object", None)
            (part.get("usage") or {}).pop("prompt_tokens_details", None)
    return value


def _one_by_one(asked: Asked, data: bytes) -> bytes:
    """Every answer says that the connection ends, and that a proxy was there."""
    head, _, body = data.partition(b"\r\n\r\n")
    return head + b"\r\nConnection: close\r\nVia: 1.1 proxy\r\n\r\n" + body


def _says_cut(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp says that it shortened a prompt."""
    return {**body, "truncated": asked.prompt_tokens >= 2048}


def _null_usage(asked: Asked, chunks: list[Any]) -> list[Any]:
    """`usage: null` and an empty `error` in every chunk but the last, as OpenAI has it."""
    return [
        {"usage": None, "error": None, "system_fingerprint": None, **c}
        if isinstance(c, dict)
        else c
        for c in chunks
    ]


def _running_usage(asked: Asked, chunks: list[Any]) -> list[Any]:
    """Usage in every chunk, as vLLM's continuous_usage_stats."""
    last = next((c["usage"] for c in chunks if isinstance(c, dict) and c.get("usage")), None)
    return [
        {**c, "usage": last} if last and isinstance(c, dict) and c.get("choices") else c
        for c in chunks
    ]


def _lines_of_ten(_: Asked, text: str) -> str:
    """A new line after every tenth number."""
    parts = text.split(", ")
    if len(parts) < 100:
        return text
    rows = [", ".join(parts[n : n + 10]) for n in range(0, len(parts), 10)]
    return ",\n".join(rows)


def _kimi_ids(asked: Asked, reply: Reply) -> None:
    """`functions.NAME:n`, counted through the conversation."""
    before = sum(len(m.get("tool_calls") or []) for m in asked.body.get("messages", []))
    for place, call in enumerate(reply.calls):
        call["id"] = f"functions.{call['function']['name']}:{before + place}"


class SlowServer(ModelServer):
    """Answers one after the other, each in ten milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Lock()

    async def _answer(self, *arguments: Any) -> bytes:
        answer = await super()._answer(*arguments)
        async with self.turn:
            await asyncio.sleep(0.01)
        return answer


MANNERS: dict[str, ModelServer] = {
    "vLLM": ThinkingServer(Fault(body=_vllm_models, chunks=_vllm_chunks)),
    "SGLang": ModelServer(
        Fault(body=_sglang_body, chunks=_sglang_chunks, raw=_no_content_of_health)
    ),
    "no logprobs, no counts in streams": ModelServer(
        Fault(
            asked=_refuse(lambda a: bool({"logprobs", "stream_options"} & a.body.keys()), 501),
            chunks=_no_counts_in_streams,
            raw=_word_of_health,
        )
    ),
    "no health, no messages": ModelServer(
        Fault(asked=_refuse(lambda a: a.path in ("/health", "/v1/messages"), 404))
    ),
    "a small context that it does not name": ModelServer(
        Fault(body=_nameless_context), context=500
    ),
    "no schemas, seeds or system prompts": ModelServer(Fault(asked=_knows_little)),
    "comments, and events of several lines": ModelServer(Fault(chunks=_pinging, raw=_old_http)),
    "pieces of three bytes": ModelServer(Fault(raw=_small_chunks)),
    "so many at once": BusyServer(),
    "a byte order mark before the first event": ModelServer(Fault(raw=_marked)),
    "integers written as 40.0": ModelServer(Fault(reply=_with_fractions)),
    "no ids, no details of the usage": ModelServer(Fault(body=_nameless, chunks=_nameless)),
    "one choice only": ModelServer(Fault(asked=_refuse(lambda a: a.body.get("n", 1) > 1, 400))),
    "a connection for each answer": ModelServer(Fault(raw=_one_by_one)),
    "prompts cut, and it says so": ModelServer(Fault(body=_says_cut, cuts_prompts=True)),
    "null in every chunk": ModelServer(Fault(chunks=_null_usage)),
    "usage in every chunk": ModelServer(Fault(chunks=_running_usage)),
    "a new line after ten numbers": ModelServer(Fault(text=_lines_of_ten)),
    "one after the other": SlowServer(),
    "call ids of Kimi": ModelServer(Fault(reply=_kimi_ids)),
    "an end as probable as going on": EndingServer(),
}
