"""Faults that Claude Code and Codex meet: what they read of a stream, and what they send."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.testbed.model_server import COUNT_TOKENS, Asked, Fault, Refusal

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
DONE = "response.output_item.done"


def without_events(*kinds: str) -> Callable[[Asked, list[Any]], list[Any]]:
    """Streams in which events of these types are missing."""
    return lambda _, chunks: [
        c for c in chunks if not (isinstance(c, dict) and c.get("type") in kinds)
    ]


def without_names(asked: Asked, data: bytes) -> bytes:
    """Streams of /v1/messages whose events have no names."""
    if asked.path != MESSAGES or b"text/event-stream" not in data[:200]:
        return data
    head, _, body = data.partition(b"\r\n\r\n")
    body = re.sub(rb"(?m)^event: .*\n", b"", body)
    return re.sub(rb"(Content-Length:) \d+", rb"\1 %d" % len(body), head) + b"\r\n\r\n" + body


def _wrong_names(asked: Asked, data: bytes) -> bytes:
    return data.replace(b"event: content_block_delta", b"event: message") if asked.path else data


def _item_cut(asked: Asked, chunks: list[Any]) -> list[Any]:
    """What is said to be done is the item as it began."""
    if asked.path != RESPONSES:
        return chunks
    begun = {c.get("output_index"): c["item"] for c in chunks if c["type"].endswith("item.added")}
    return [
        {**c, "item": begun.get(c["output_index"], c["item"])} if c["type"] == DONE else c
        for c in chunks
    ]


def _turns_lost(is_lost: Callable[[dict[str, Any]], bool]) -> Callable[[Asked], None]:
    def lose(asked: Asked) -> None:
        messages = asked.body.get("messages", [])
        kept = [m for at, m in enumerate(messages) if not (at and is_lost(m))]
        asked.body["messages"] = kept
        if len(kept) < len(messages):
            asked.text = "\n".join(
                part["text"] for m in kept for part in _blocks(m) if "text" in part
            )

    return lose


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"text": str(content or "")}]


def _fails(condition: Callable[[Asked], bool]) -> Callable[[Asked], None]:
    def fail(asked: Asked) -> None:
        if condition(asked):
            raise Refusal(500, "Internal Server Error")

    return fail


def _has_block(asked: Asked, kind: str) -> bool:
    return any(b.get("type") == kind for m in asked.body.get("messages", []) for b in _blocks(m))


def _counts(change: Callable[[int], Any]) -> Callable[[Asked, Any], Any]:
    def counted(asked: Asked, body: Any) -> Any:
        is_count = asked.path == COUNT_TOKENS
        return {"input_tokens": change(body["input_tokens"])} if is_count else body

    return counted


CLIENT_FAULTS = [
    Fault("events of /v1/messages without names", "tools", raw=without_names),
    Fault("events of /v1/messages with other names", "tools", raw=_wrong_names),
    Fault("no message_start", "tools", chunks=without_events("message_start")),
    Fault("no content_block_start", "tools", chunks=without_events("content_block_start")),
    Fault("no content_block_stop", "tools", chunks=without_events("content_block_stop")),
    Fault(
        "late system turns of blocks lost",
        "agents",
        asked=_turns_lost(lambda m: m["role"] == "system" and isinstance(m["content"], list)),
    ),
    Fault(
        "thinking that is sent back ends the server's patience",
        "agents",
        asked=_fails(lambda a: _has_block(a, "thinking")),
        needs="reasoning",
    ),
    Fault(
        "a system prompt of blocks fails",
        "agents",
        asked=_fails(lambda a: a.path == MESSAGES and isinstance(a.body.get("system"), list)),
    ),
    Fault(
        "adaptive thinking fails",
        "agents",
        asked=_fails(lambda a: a.body.get("thinking", {}).get("type") == "adaptive"),
    ),
    Fault("count_tokens counts words", "agents", body=_counts(lambda n: n // 2)),
    Fault("count_tokens counts nothing", "agents", body=_counts(lambda _: None)),
    Fault("items of /v1/responses never done", "responses", chunks=without_events(DONE)),
    Fault("items of /v1/responses done too early", "responses", chunks=_item_cut),
    Fault(
        "the second developer's message lost",
        "responses",
        asked=_turns_lost(lambda m: m["role"] == "system" and m.get("type") == "message"),
    ),
    Fault(
        "a web search among the tools fails",
        "responses",
        asked=_fails(lambda a: any(t.get("type") == "web_search" for t in a.body.get("tools", []))),
    ),
    Fault(
        "reasoning that is sent back fails",
        "responses",
        asked=_fails(
            lambda a: (
                a.path == RESPONSES
                and any(
                    i.get("type") == "reasoning"
                    for i in a.body.get("input", [])
                    if isinstance(i, dict)
                )
            )
        ),
        needs="reasoning",
    ),
]
