"""Faults that were planted only when the ladder was finished: how many does it see at first try?

33 of these 41 were caught then; the other eight are caught since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.testbed.model_brain import chance
from tests.testbed.model_server import Asked, Fault, Refusal, Reply, Token

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def _said(reply: Reply, text: str) -> None:
    reply.text, reply.tokens = text, [Token(text, -0.1, [("x", -3.0)])]


def _when(
    condition: Callable[[Asked], bool], change: Callable[[Asked, Reply], None]
) -> Callable[[Asked, Reply], None]:
    return lambda asked, reply: change(asked, reply) if condition(asked) else None


def _text(
    condition: Callable[[Asked], bool], change: Callable[[str], str]
) -> Callable[[Asked, str], str]:
    return lambda asked, text: change(text) if condition(asked) else text


def _refused(condition: Callable[[Asked], bool], status: int) -> Callable[[Asked], None]:
    def asked(request: Asked) -> None:
        if condition(request):
            raise Refusal(status, "cannot do that now")

    return asked


def _more(name: str, number: int) -> Callable[[Asked, Reply], None]:
    return lambda _, reply: setattr(reply, name, (getattr(reply, name) or 0) + number)


def _stop_kept(asked: Asked, reply: Reply) -> None:
    if asked.body.get("stop") and reply.finish == "stop":
        reply.tokens.append(Token(f" {asked.body['stop'][0]}", -0.1, [("x", -3.0)]))
        reply.text = "".join(t.text for t in reply.tokens)


def _second_empty(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
    for choice in body.get("choices", [])[1:]:
        choice["message"]["content"] = ""
    return body


def _late_answers() -> Callable[[Asked, str], str]:
    """From the third request of a connection on, each gets the answer before."""
    last: dict[int, str] = {}

    def text(asked: Asked, text: str) -> str:
        before = last.get(asked.connection, text)
        last[asked.connection] = text
        return before if asked.reuses >= 2 else text

    return text


def _cut_on_reuse(asked: Asked, data: bytes) -> bytes:
    if asked.reuses < 3 or not asked.is_stream:
        return data
    return data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)[:-20]


def _no_stream_logprobs(asked: Asked, chunks: list[Any]) -> list[Any]:
    for chunk in chunks:
        for choice in chunk.get("choices", []) if isinstance(chunk, dict) else []:
            choice.pop("logprobs", None)
    return chunks


def _one_top(_: Asked, reply: Reply) -> None:
    for token in reply.tokens:
        token.others = []


def _usage_before() -> Callable[[Asked, Reply], None]:
    """The count of the answer before."""
    last = [5]

    def reply(asked: Asked, reply: Reply) -> None:
        before, last[0] = last[0], reply.completion_tokens
        reply.completion_tokens = before

    return reply


def _enum(every: int) -> Callable[[Asked, str], str]:
    count = [0]

    def text(asked: Asked, text: str) -> str:
        count[0] += "response_format" in asked.body
        is_due = "response_format" in asked.body and count[0] % every == 0
        return re.sub("Oslo|Bergen|Tromsø", "Narvik", text) if is_due else text

    return text


def _calls(change: Callable[[dict[str, Any]], None]) -> Callable[[Asked, Reply], None]:
    def reply(_: Asked, reply: Reply) -> None:
        for call in reply.calls:
            change(call["function"])

    return reply


def _body_of(
    path: str, change: Callable[[dict[str, Any]], None]
) -> Callable[[Asked, dict[str, Any]], dict[str, Any]]:
    def body(asked: Asked, body: dict[str, Any]) -> dict[str, Any]:
        if asked.path == path:
            change(body)
        return body

    return body


def _end_turn(body: dict[str, Any]) -> None:
    body["stop_reason"] = "end_turn"


def _input_as_text(body: dict[str, Any]) -> None:
    for block in body.get("content", []):
        if block["type"] == "tool_use":
            block["input"] = json.dumps(block["input"])


def _no_input_tokens(asked: Asked, chunks: list[Any]) -> list[Any]:
    for chunk in chunks if asked.path == MESSAGES else []:
        usage = chunk.get("usage") or (chunk.get("message") or {}).get("usage") or {}
        if "input_tokens" in usage:
            usage |= {"input_tokens": 0, "cache_read_input_tokens": 0}
    return chunks


def _final_doubled(asked: Asked, chunks: list[Any]) -> list[Any]:
    if asked.path == RESPONSES:
        for item in chunks[-1]["response"]["output"]:
            for part in item.get("content", []):
                part["text"] *= 2
    return chunks


def _no_call_id(body: dict[str, Any]) -> None:
    for item in body.get("output", []):
        item.pop("call_id", None)


def _two_ends(asked: Asked, chunks: list[Any]) -> list[Any]:
    """An end before the end: a client that stops there has half of the answer."""
    if asked.path == CHAT and len(chunks) > 12:
        chunks[len(chunks) // 2]["choices"][0]["finish_reason"] = "stop"
    return chunks


def _one_beyond(asked: Asked, reply: Reply) -> None:
    if reply.finish == "length" and asked.body.get("max_tokens", 0) > 16:
        reply.tokens.append(Token(" and", -0.1, [("x", -3.0)]))
        reply.text += " and"
        reply.completion_tokens += 1


def _no_emoji(_: Asked, reply: Reply) -> None:
    for call in reply.calls:
        call["function"]["arguments"] = call["function"]["arguments"].replace("🎉", "")


def _numbers(asked: Asked) -> bool:
    return "in digits" in asked.text


def _plus_one(text: str) -> str:
    return re.sub(r"(\d)(\D*)$", lambda m: str((int(m[1]) + 1) % 10) + m[2], text)


FRESH_FAULTS = [
    Fault("stop word kept in the text", "answers", reply=_stop_kept),
    Fault("second choice empty", "answers", body=_second_empty),
    Fault(
        "n ignored in streams",
        "answers",
        asked=lambda a: a.body.pop("n", None) if a.is_stream else None,
    ),
    Fault("answers late by one on a kept connection", "streams", text=_late_answers()),
    Fault("kept connection ends in mid-answer", "streams", raw=_cut_on_reuse),
    Fault("503 after thirty cancels", "streams", asked=_refused(lambda a: a.cancels > 30, 503)),
    Fault("500 after one cancel", "streams", asked=_refused(lambda a: a.cancels == 1, 500)),
    Fault(
        "prompts counted higher after cancels",
        "length",
        reply=_when(lambda a: a.cancels > 0 and a.number % 7 == 0, _more("prompt_tokens", 90)),
    ),
    Fault(
        "system prompt ignored in streams",
        "agents",
        asked=lambda a: (
            setattr(a, "text", "\n".join(str(m["content"]) for m in a.body["messages"][-1:]))
            if a.is_stream and a.body.get("messages")
            else None
        ),
    ),
    Fault("one token beyond the limit", "first-answer", reply=_one_beyond),
    Fault(
        "streams sampled at temperature 0",
        "answers",
        text=lambda a, t: str(chance(a.number)) if "random" in a.text and a.is_stream else t,
    ),
    Fault(
        "seed ignored in streams",
        "answers",
        text=lambda a, t: str(chance(a.number)) if "seed" in a.body and a.is_stream else t,
    ),
    Fault("no logprobs in streams", "answers", chunks=_no_stream_logprobs),
    Fault("one token of top_logprobs where five were asked", "answers", reply=_one_top),
    Fault("usage of the answer before", "first-answer", reply=_usage_before()),
    Fault(
        "words behind the JSON of a schema",
        "answers",
        text=_text(lambda a: "response_format" in a.body, lambda t: t + "\nDone."),
    ),
    Fault("enum of a schema broken once in fifteen", "answers", text=_enum(15)),
    Fault(
        "comma behind the last argument under load",
        "streams",
        reply=_when(
            lambda a: a.load >= 4,
            _calls(lambda f: f.update(arguments=f["arguments"].replace("}", ",}"))),
        ),
    ),
    Fault(
        "name of a tool doubled in streams under load",
        "streams",
        reply=_when(
            lambda a: a.load >= 4 and a.is_stream, _calls(lambda f: f.update(name=f["name"] * 2))
        ),
    ),
    Fault("end_turn of /v1/messages after a call", "agents", body=_body_of(MESSAGES, _end_turn)),
    Fault(
        "input of a tool as text in /v1/messages", "agents", body=_body_of(MESSAGES, _input_as_text)
    ),
    Fault("no input tokens in streams of /v1/messages", "agents", chunks=_no_input_tokens),
    Fault("text of /v1/responses doubled in the end", "responses", chunks=_final_doubled),
    Fault(
        "calls of /v1/responses without an id", "responses", body=_body_of(RESPONSES, _no_call_id)
    ),
    Fault(
        "/v1/responses fails with status 200",
        "responses",
        body=_body_of(RESPONSES, lambda b: b.update(status="failed", output=[])),
    ),
    Fault(
        "needles wrong in streams of long prompts",
        "length",
        text=_text(
            lambda a: a.is_stream and a.prompt_tokens > 1400 and "secret" in a.text, _plus_one
        ),
    ),
    Fault(
        "everything wrong after 453 requests",
        "agents",
        text=_text(lambda a: a.number > 453, _plus_one),
    ),
    Fault(
        "streams wait three seconds from eight at once on",
        "streams",
        delay_s=lambda a: 3.0 if a.load == 8 and a.is_stream else 0.0,
    ),
    Fault(
        "answers end after ninety tokens",
        "length",
        reply=_when(
            lambda a: True,
            lambda a, r: (
                _said(r, "".join(t.text for t in r.tokens[:90])) if len(r.tokens) > 95 else None
            ),
        ),
    ),
    Fault("emoji lost in arguments", "tools", reply=_no_emoji),
    Fault(
        "prompts counted higher each time they come",
        "first-answer",
        reply=lambda a, r: setattr(r, "prompt_tokens", r.prompt_tokens + a.times),
    ),
    Fault(
        "more cached tokens than the prompt has",
        "memory",
        reply=_when(lambda a: a.path == CHAT and a.cached_tokens > 0, _more("cached_tokens", 5000)),
    ),
    Fault(
        "model in capital letters in streams",
        "first-answer",
        reply=_when(lambda a: a.is_stream, lambda a, r: setattr(r, "model", r.model.upper())),
    ),
    Fault(
        "second tool result not read",
        "tools",
        text=_text(
            lambda a: a.text.count("lamp") > 0 and a.body["messages"][-1]["role"] == "tool",
            lambda t: "Done, I think.",
        ),
    ),
    Fault(
        "garbage late in long whole answers",
        "length",
        text=_text(
            lambda a: not a.is_stream and _numbers(a),
            lambda t: t[:200] + " blorb xq" * 5 if len(t) > 260 else t,
        ),
    ),
    Fault(
        "409 for every fiftieth request",
        "answers",
        asked=_refused(lambda a: a.number % 50 == 49, 409),
    ),
    Fault(
        "second request of a connection refused",
        "streams",
        asked=_refused(lambda a: a.reuses == 1, 400),
    ),
    Fault("an end in the middle of streams", "first-answer", chunks=_two_ends),
    Fault(
        "accents lost in streams",
        "answers",
        text=_text(lambda a: a.is_stream, lambda t: t.replace("ü", "u")),
    ),
    Fault(
        "minus sign lost under load",
        "answers",
        text=_text(lambda a: a.load >= 4, lambda t: t.lstrip("-")),
    ),
    Fault(
        "aborted tools leave their call in the next answer",
        "streams",
        reply=_when(
            lambda a: a.cancels > 3 and a.number % 5 == 0 and _numbers(a),
            lambda a, r: _said(r, '<tool_call>{"name": "x"}</tool_call>'),
        ),
    ),
]
