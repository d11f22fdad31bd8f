"""More faults to plant, each with the rung that should see it: states, encodings and loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.testbed.model_server import Asked, Fault, Refusal, Reply, Token


def _refuse(when: Callable[[Asked], bool], status: int = 500) -> Callable[[Asked], None]:
    def asked(request: Asked) -> None:
        if when(request):
            raise Refusal(status, "internal error")

    return asked


def _text(
    when: Callable[[Asked], bool], change: Callable[[str], str]
) -> Callable[[Asked, str], str]:
    return lambda asked, text: change(text) if when(asked) else text


def _in_body(change: Callable[[Asked, dict[str, Any]], None]) -> Callable[..., dict[str, Any]]:
    def body(asked: Asked, value: dict[str, Any]) -> dict[str, Any]:
        change(asked, value)
        return value

    return body


def _message(change: Callable[[dict[str, Any]], None]) -> Callable[..., dict[str, Any]]:
    def apply(_: Asked, value: dict[str, Any]) -> None:
        for choice in value.get("choices", []):
            change(choice)

    return _in_body(apply)


def _deltas(change: Callable[[dict[str, Any], int], None]) -> Callable[..., list[Any]]:
    def chunks(_: Asked, values: list[Any]) -> list[Any]:
        for number, chunk in enumerate(values):
            for choice in chunk.get("choices", []) if isinstance(chunk, dict) else []:
                change(choice, number)
        return values

    return chunks


def _spaces_lost(choice: dict[str, Any], number: int) -> None:
    content = choice["delta"].get("content")
    if content:
        choice["delta"]["content"] = content.strip() or content


def _first_empty(_: Asked, values: list[Any]) -> list[Any]:
    return values[1:]


def _reordered(_: Asked, values: list[Any]) -> list[Any]:
    return [values[1], values[0], *values[2:]] if len(values) > 6 else values


def _usage_first(_: Asked, values: list[Any]) -> list[Any]:
    """Tokens are counted in the stream before the last ones came."""
    for chunk in values:
        if isinstance(chunk, dict) and chunk.get("usage"):
            chunk["usage"]["completion_tokens"] = max(1, chunk["usage"]["completion_tokens"] // 2)
            usage = chunk["usage"]
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return values


def _bytes_escaped(_: Asked, text: str) -> str:
    """Bytes of other scripts as the tokenizer's own marks, as of byte-level BPE."""
    return "".join(c if c.isascii() else f"<0x{c.encode()[0]:02X}>" for c in text)


def _argument_twice(_: Asked, reply: Reply) -> None:
    for call in reply.calls:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])


def _other_tool(_: Asked, reply: Reply) -> None:
    for call in reply.calls:
        if call["function"]["name"] == "list_files":
            call["function"]["name"] = "functions.list_files:0"


def _extra_argument(_: Asked, reply: Reply) -> None:
    for call in reply.calls:
        value = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps({**value, "reason": "asked"})


def _call_and_text(_: Asked, reply: Reply) -> None:
    if reply.calls and not reply.text:
        reply.calls = reply.calls * 2


def _think_tail(_: Asked, reply: Reply) -> None:
    """The opening mark was part of the prompt, so only the closing one is in the answer."""
    reply.tokens.insert(0, Token("It is easy.</think>", -0.1, [("x", -3.0)]))
    reply.text = "".join(t.text for t in reply.tokens)


def _headers(change: Callable[[bytes], bytes]) -> Callable[[Asked, bytes], bytes]:
    def raw(_: Asked, data: bytes) -> bytes:
        head, sep, body = data.partition(b"\r\n\r\n")
        return change(head) + sep + body

    return raw


def _truncated_prompt(asked: Asked, reply: Reply) -> None:
    """The middle of a long prompt is dropped, and the count is of what was kept."""
    if asked.prompt_tokens > 900:
        reply.prompt_tokens = 600


def _digits_swapped(text: str) -> str:
    return re.sub(r"(\d)(\d)(?=\D*$)", r"\2\1", text)


def _page(data: bytes) -> bytes:
    page = b"<html><body>502 Bad Gateway</body></html>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n"
    return head % len(page) + page


def _as_json(head: bytes) -> bytes:
    return head.replace(b"text/event-stream", b"application/json")


def _named(name: str) -> Callable[[Asked, Reply], None]:
    return lambda _, reply: setattr(reply, "model", name)


def _prompt_zero(_: Asked, reply: Reply) -> None:
    reply.prompt_tokens = 0


def _tool_role(choice: dict[str, Any]) -> None:
    choice["message"]["role"] = "tool"


def _rounded(_: Asked, reply: Reply) -> None:
    """Logprobs in half precision: the sure ones are all zero, and so are the others."""
    for token in reply.tokens:
        token.logprob = 0.0
        token.others = [(other, 0.0) for other, _ in token.others]


def _two_choices(_: Asked, value: dict[str, Any]) -> None:
    if value.get("choices"):
        value["choices"] = [{**value["choices"][0], "index": 1}, *value["choices"]]
        value["choices"][0] = json.loads(json.dumps(value["choices"][0]))
        value["choices"][0]["message"]["content"] = "something else"


MORE_FAULTS = [
    Fault("HTML in place of JSON", "first-answer", raw=lambda a, d: _page(d) if a.body else d),
    Fault("stream with the type of JSON", "first-answer", raw=_headers(_as_json)),
    Fault("model name with its path", "first-answer", reply=_named("/models/brain-1")),
    Fault("prompt counted as zero tokens", "first-answer", reply=_prompt_zero),
    Fault("role of a tool in whole answers", "first-answer", body=_message(_tool_role)),
    Fault("another choice before the answer", "first-answer", body=_in_body(_two_choices)),
    Fault("spaces lost in streams", "first-answer", chunks=_deltas(_spaces_lost)),
    Fault("first chunk of a stream lost", "first-answer", chunks=_first_empty),
    Fault("first chunks in another order", "first-answer", chunks=_reordered),
    Fault("streams counted by half", "first-answer", chunks=_usage_first),
    Fault("logprobs rounded to zero", "answers", reply=_rounded),
    Fault("bytes as marks of the tokenizer", "answers", text=_bytes_escaped),
    Fault("negative numbers lose their sign", "answers", text=lambda a, t: t.lstrip("-")),
    Fault(
        "products above 400 wrong by one",
        "speculation",
        text=_text(
            lambda a: " * " in a.text,
            lambda t: str(int(t) - 1) if t.isdigit() and int(t) > 400 else t,
        ),
    ),
    Fault(
        "word problems swap digits",
        "answers",
        text=_text(lambda a: "How many" in a.text, _digits_swapped),
    ),
    Fault(
        "JSON with single quotes in streams",
        "answers",
        text=_text(
            lambda a: bool(a.body.get("response_format")) and a.is_stream,
            lambda t: t.replace('"', "'"),
        ),
    ),
    Fault("everything in small letters", "answers", text=lambda a, t: t.lower()),
    Fault("arguments encoded twice", "tools", reply=_argument_twice),
    Fault("name of a tool with its namespace", "tools", reply=_other_tool),
    Fault("an argument that no tool has", "tools", reply=_extra_argument),
    Fault("every call made twice", "tools", reply=_call_and_text),
    Fault("closing mark of thinking alone", "answers", reply=_think_tail),
    Fault("503 from eight at once on", "streams", asked=_refuse(lambda a: a.load >= 8, 503)),
    Fault(
        "empty streams from sixteen at once on",
        "streams",
        text=_text(lambda a: a.load >= 16 and a.is_stream, lambda t: ""),
    ),
    Fault(
        "one digit wrong from two at once on",
        "streams",
        text=_text(
            lambda a: a.load >= 2 and "in digits" in a.text and "137" in a.text,
            lambda t: t.replace("140", "141"),
        ),
    ),
    Fault("long prompts cut and counted as cut", "length", reply=_truncated_prompt),
    Fault(
        "prompts of 512 tokens and more refused in streams",
        "length",
        asked=_refuse(lambda a: a.is_stream and a.prompt_tokens > 512),
    ),
    Fault(
        "context refused at nine tenths",
        "length",
        asked=_refuse(lambda a: a.prompt_tokens > 1800 and a.prompt_tokens < 2048),
    ),
    Fault(
        "second reading of a text loses its end",
        "memory",
        text=_text(lambda a: a.times > 1 and "Report 000007" in a.text, lambda t: t[:-1]),
    ),
    Fault(
        "texts of before a restart are forgotten",
        "memory",
        text=_text(lambda a: a.restarts > 0 and "Report" in a.text, lambda t: "0000"),
    ),
    Fault(
        "drafts counted and never accepted",
        "speculation",
        needs="drafts",
        metrics=lambda a: (
            'vllm:spec_decode_num_draft_tokens_total{engine="0"} 300.0\n'
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 0.0\n'
        ),
    ),
]
