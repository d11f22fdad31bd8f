"""The endpoints that agents speak: /v1/messages (Claude Code) and /v1/responses (Codex)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.core.foreign_json import value_at
from pipeline.serving.smoke.chat import ToolCall
from pipeline.serving.smoke.client import ChatClient, Unsound, error_in

MESSAGES, RESPONSES_PATH = "/v1/messages", "/v1/responses"
_INPUTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_STOPS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
_ENDS = ("response.completed", "response.incomplete")


@dataclass(frozen=True)
class AgentAnswer:
    """What either endpoint answered, whole or joined from its stream."""

    text: str
    calls: tuple[ToolCall, ...]
    model: str
    prompt_tokens: int
    cached_tokens: int | None  # none: the server does not say
    parts: list[dict[str, Any]]  # as the next request repeats them
    is_stream: bool


def _call(part: dict[str, Any], named: str, arguments: str) -> ToolCall:
    return ToolCall(str(part.get(named) or ""), str(part.get("name")), arguments)


async def ask_messages(
    client: ChatClient, body: Mapping[str, Any], path: str = MESSAGES
) -> AgentAnswer:
    """Asks /v1/messages for one answer; a server need not have it."""
    is_stream = bool(body.get("stream"))
    value: Any
    if is_stream:
        expected = {"has_done": False, "optional": True, "has_names": True}
        _, events = await client.stream(path, body, **expected)
        value = _joined_message([v for _, v in events if isinstance(v, dict)])
    else:
        _, value = await client.post(path, body, optional=True)
    blocks = value_at(value, "content")
    if not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
        raise Unsound("/v1/messages: the content is no list of blocks")
    if value.get("stop_reason") not in _STOPS:
        raise Unsound(f"/v1/messages: stop_reason is {value.get('stop_reason')!r}")
    usage = value.get("usage")
    if not isinstance(usage, dict) or not isinstance(usage.get("input_tokens"), int):
        raise Unsound("/v1/messages: no usage")
    # `input_tokens` leaves out what was kept of earlier prompts, which has a count of its own
    counts = {name: n for name in _INPUTS if isinstance(n := usage.get(name), int)}
    calls = [b for b in blocks if b.get("type") == "tool_use"]
    if calls and value["stop_reason"] != "tool_use":
        raise Unsound(f"/v1/messages: a tool call, and stop_reason is {value['stop_reason']!r}")
    return AgentAnswer(
        text="".join(str(b.get("text", "")) for b in blocks if b.get("type") == "text"),
        calls=tuple(_call(c, "id", json.dumps(c.get("input"))) for c in calls),
        model=str(value.get("model") or ""),
        prompt_tokens=sum(counts.values()),
        cached_tokens=counts.get("cache_read_input_tokens"),
        # thinking, too, with the server's signature
        parts=blocks,
        is_stream=is_stream,
    )


def _joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream of events writes."""
    message: dict[str, Any] = {"usage": {}}
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    is_begun, opened = False, set[int]()
    for event in events:
        kind, place = event.get("type"), event.get("index") or 0
        given = event.get("delta")
        delta: dict[str, Any] = given if isinstance(given, dict) else {}
        usage = event.get("usage")
        # Anthropic's own clients lose what comes in another order
        is_block = str(kind).startswith("content_block")
        if is_block and not (is_begun and (kind == "content_block_start" or place in opened)):
            raise Unsound(f"/v1/messages: {kind} of block {place} before its start")
        if kind == "message_start" and isinstance(event.get("message"), dict):
            is_begun = True
            usage = event["message"].get("usage")
            message = {**message, **event["message"], "usage": message["usage"]}
        elif kind == "content_block_start":
            blocks[place] = dict(event.get("content_block") or {})
            opened.add(place)
        elif kind == "content_block_stop":
            opened.discard(place)
        elif kind == "content_block_delta":
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    blocks[place][name] = str(blocks[place].get(name) or "") + str(delta[name])
            inputs[place] = inputs.get(place, "") + str(delta.get("partial_json", ""))
        elif kind == "message_delta":
            message |= delta
        if isinstance(usage, dict):
            message["usage"] |= {k: v for k, v in usage.items() if v is not None}
    if not events or events[-1].get("type") != "message_stop":
        words = next((f": {error_in(e)}" for e in events if error_in(e)), "")
        raise Unsound(f"/v1/messages: the stream ended without message_stop{words}")
    if opened:
        raise Unsound(f"/v1/messages: block {min(opened)} has no content_block_stop")
    for place, block in blocks.items():
        if block.get("type") == "tool_use":
            try:
                block["input"] = json.loads(inputs.get(place) or "{}")
            except ValueError as error:
                raise Unsound(f"/v1/messages: the input of a call is {inputs[place]!r}") from error
    return {**message, "content": [blocks[place] for place in sorted(blocks)]}


def _is_same(item: dict[str, Any], other: Any) -> bool:
    """Whether two items say the same; ids may differ."""
    if not isinstance(other, dict):
        return False
    texts = []
    for each in (item, other):
        parts: Any = each.get("content")
        parts = parts if isinstance(parts, list) else []
        texts.append([part.get("text") for part in parts if isinstance(part, dict)])
    named = ("type", "name", "arguments")
    return texts[0] == texts[1] and all(item.get(key) == other.get(key) for key in named)


async def ask_responses(client: ChatClient, body: Mapping[str, Any]) -> AgentAnswer:
    """Asks /v1/responses for one answer; a server need not have it."""
    is_stream = bool(body.get("stream"))
    deltas: dict[str, str] = {}
    done: list[Any] = []
    value: Any
    if is_stream:
        _, events = await client.stream(RESPONSES_PATH, body, has_done=False, optional=True)
        values = [v for _, v in events if isinstance(v, dict)]
        if not values or values[-1].get("type") not in _ENDS:
            failed = [v.get("response") if "response" in v else v for v in values[-1:]]
            words = "".join(f": {error_in(v)}" for v in failed if error_in(v))
            raise Unsound(f"/v1/responses: the stream ended without response.completed{words}")
        for event in values:
            kind, _, what = str(event.get("type")).rpartition(".")
            if what == "delta":
                deltas[kind] = deltas.get(kind, "") + str(event.get("delta", ""))
            if event.get("type") == "response.output_item.done":
                done.append(event.get("item"))
        value = values[-1].get("response")
    else:
        _, value = await client.post(RESPONSES_PATH, body, optional=True)
    items = value_at(value, "output")
    if not isinstance(items, list) or not all(isinstance(i, dict) for i in items):
        raise Unsound("/v1/responses: the output is no list of items")
    if value.get("status") not in ("completed", "incomplete"):
        raise Unsound(f"/v1/responses: status is {value.get('status')!r}")
    messages = [i for i in items if i.get("type") == "message"]
    parts = [p for i in messages for p in i.get("content") or [] if isinstance(p, dict)]
    text = "".join(str(p.get("text", "")) for p in parts if p.get("type") == "output_text")
    calls = [i for i in items if i.get("type") == "function_call"]
    arguments = "".join(str(c.get("arguments", "")) for c in calls)
    for kind, want in (("output_text", text), ("function_call_arguments", arguments)):
        got = deltas.get(f"response.{kind}", "")
        # some send a short call in one piece, and no deltas
        if is_stream and got != want and (got or kind == "output_text"):
            raise Unsound(f"/v1/responses: deltas of {got[:60]!r}, and in the end {want[:60]!r}")
    # Codex reads these, and nothing of the end
    missing = [i for i in (*messages, *calls) if not any(_is_same(i, each) for each in done)]
    if is_stream and missing:
        kind = missing[0].get("type")
        raise Unsound(f"/v1/responses: no response.output_item.done has the {kind} of the end")
    usage = value.get("usage") if isinstance(value.get("usage"), dict) else {}
    given = [usage.get(name) for name in ("input_tokens", "output_tokens", "total_tokens")]
    counts = [n for n in given if isinstance(n, int) and n > 0]
    if len(counts) < len(given) or sum(counts[:2]) != counts[2]:
        raise Unsound(f"/v1/responses: usage does not add up: {usage}")
    cached = value_at(usage, "input_tokens_details", "cached_tokens")
    return AgentAnswer(
        text=text,
        calls=tuple(_call(c, "call_id", str(c.get("arguments"))) for c in calls),
        model=str(value.get("model") or ""),
        prompt_tokens=counts[0],
        cached_tokens=cached if isinstance(cached, int) else None,
        parts=items,
        is_stream=is_stream,
    )
