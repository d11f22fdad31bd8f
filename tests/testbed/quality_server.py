"""A model server for comparisons of quality: it renders, counts, calls tools, and predicts.

Sound, unless it is told a fault.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from pipeline.images.gate.templates.renderer import ChatTemplate

MODEL = "counter-1"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}<|args|>"
    "{{ c.function.arguments | tojson }}<|/call|>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)  # fmt: skip
_TEMPLATE = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
CONFIG = {"chat_template": TEMPLATE, "bos_token": "<s>"}
_TOKEN = re.compile(r"<[^<>\s]{1,40}>|\s?\w{1,6}|.", re.S)
_WORDS = (" the", " of", " ship", " harbour", " day", "<|end|>", '"', " and")


def tokenize(text: str) -> list[str]:
    """Marks, and parts of words."""
    return _TOKEN.findall(text)


@lru_cache(maxsize=8192)
def _token_count(asked: str) -> int:
    """How many tokens a request has, given as JSON: all servers are asked the same."""
    messages, tools, options = json.loads(asked)
    return len(tokenize(_TEMPLATE.render(messages, tools, options=options)))


def same(value: Any, *_: Any) -> Any:
    return value


@dataclass(frozen=True)
class QualityFault:
    """One way to go wrong, and the part that must see it."""

    name: str = "none"
    part: str = ""
    count: Callable[[int, dict[str, Any]], int] = (
        same  # the number of a prompt's tokens, the request
    )
    body: Callable[[dict[str, Any]], dict[str, Any]] = same  # a request before it is rendered
    # the tool and its arguments, the number of the call, whether it is streamed
    call: Callable[[tuple[str, str], int, bool], tuple[str, str] | None] = same
    finish: str = "tool_calls"
    # what follows a text, by its log probabilities
    logits: Callable[[dict[str, float], str], dict[str, float]] = same
    has_usage: bool = True
    has_logprobs: bool = True
    is_nan: bool = False  # all logits are: JSON has null for that
    writes_legacy: bool = True  # as vLLM writes log probabilities of completions


def follows(text: str, seed: str = "") -> dict[str, float]:
    """Log probabilities of what comes next; they depend on the end of the text alone."""
    dice = Random(seed + text[-24:])
    raw = {word: dice.gauss(0, 2.0) for word in _WORDS}
    most = math.log(sum(math.exp(value) for value in raw.values()))
    return {word: value - most for word, value in raw.items()}


class QualityServer:
    """Answers requests; told one fault at most."""

    def __init__(self, fault: QualityFault | None = None) -> None:
        self.fault = fault or QualityFault()
        self.requests = self.calls = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.I)
            data = await reader.readexactly(int(length[1]) if length else 0)
            self.requests += 1
            status, body, kind = self._answer(head.split(" ", 2)[1], json.loads(data or b"{}"))
            head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}"
            writer.write(head.encode() + b"\r\n\r\n" + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes, str]:
        value: Any = {"error": "there is no such page"}
        if path == "/health":
            value = {"status": "ok"}
        elif path == "/v1/models":
            value = {"data": [{"id": MODEL}]}
        elif path == "/tokenize":
            value = {"tokens": list(range(len(tokenize(body["prompt"]))))}
        elif path == "/v1/completions":
            value = self._completion(body)
        elif path == "/v1/chat/completions":
            value = self._chat(body)
            if body.get("stream"):
                return 200, _events(value), "text/event-stream"
        return 404 if "error" in value else 200, json.dumps(value).encode(), "application/json"

    def _completion(self, body: dict[str, Any]) -> Any:
        if not self.fault.has_logprobs:
            return {"choices": [{"text": "x", "logprobs": None}]}
        known = self.fault.logits(follows(body["prompt"]), body["prompt"])
        top: Any = sorted(known.items(), key=lambda item: -item[1])[: body["logprobs"]]
        first, logprob = top[0]
        if self.fault.is_nan:
            top, logprob = [(word, None) for word, _ in top], None
        if self.fault.writes_legacy:
            given: Any = {
                "tokens": [first],
                "token_logprobs": [logprob],
                "top_logprobs": [dict(top)],
            }
        else:
            listed = [{"token": token, "logprob": value} for token, value in top]
            given = {"content": [{"token": first, "logprob": logprob, "top_logprobs": listed}]}
        return {"choices": [{"text": first, "logprobs": given, "finish_reason": "length"}]}

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = self.fault.body(body)
        prompted = asked["messages"], asked.get("tools"), asked.get("chat_template_kwargs")
        count = self.fault.count(_token_count(json.dumps(prompted)), body)
        message: dict[str, Any] = {"role": "assistant", "content": "Hello"}
        finish = "length"
        prompt = str(body["messages"][-1].get("content"))
        wanted = re.fullmatch(r"(?s)Call the tool (\S+) once.*?\n(.*)", prompt)
        if wanted and body.get("tools"):
            self.calls += 1
            call = self.fault.call((wanted[1], wanted[2]), self.calls, bool(body.get("stream")))
            finish = self.fault.finish if call else "stop"
            message["content"] = None if call else f"<tool_call>{wanted[1]}"
            if call:
                function = {"name": call[0], "arguments": call[1]}
                given = {"id": f"c{self.calls}", "type": "function", "function": function}
                message["tool_calls"] = [given]
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
        # engines count a stream only where they are asked to
        is_asked = not body.get("stream") or "include_usage" in body.get("stream_options", {})
        given = {"usage": usage} if self.fault.has_usage and is_asked else {}
        return {"model": MODEL, "choices": [choice], **given}


def _events(value: dict[str, Any]) -> bytes:
    """The answer in pieces of seven characters."""
    choice = value["choices"][0]
    message, deltas = choice["message"], []
    if message["content"]:
        deltas.append({"role": "assistant", "content": message["content"]})
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        first = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        deltas.append({"tool_calls": [first]})
        for piece in re.findall(r"(?s).{1,7}", function["arguments"]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    chunks = [{"model": MODEL, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks.append({"model": MODEL, "choices": [end]})
    if "usage" in value:
        chunks.append({"model": MODEL, "choices": [], "usage": value["usage"]})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()
