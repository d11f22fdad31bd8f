"""Clients of other APIs: what they put together from Anthropic's and OpenAI's newer events.

Both become the same answer that a client of chat completions has, so one truth judges all.
"""

from __future__ import annotations

import json
from typing import Any

from .answers import ClientAnswer, Json

# Each API's own word for why an answer ended.
_STOPS = {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}
_DELTAS = {
    "thinking_delta": ("thinking", "thinking"),
    "text_delta": ("text", "text"),
    "input_json_delta": ("tool_use", "partial_json"),
}


class ChatReader:
    """Reads chunks of chat completions."""

    def __init__(self) -> None:
        self.answer = ClientAnswer()

    def read(self, event: Json) -> None:
        for choice in event.get("choices", []):
            self.answer.add(choice)

    def ended(self) -> ClientAnswer:
        return self.answer


class MessagesReader:
    """Reads the events of /v1/messages block by block, as Anthropic's clients do."""

    def __init__(self) -> None:
        self.answer = ClientAnswer()
        self._blocks: list[Json] = []
        self._open: int | None = None
        self._seen: list[str] = []

    def read(self, event: Json) -> None:
        kind, faults = event["type"], self.answer.faults
        self._seen.append(kind)
        if kind == "content_block_start":
            block = dict(event["content_block"])
            # a client finds blocks by their number, and adds to one at a time
            if event["index"] != len(self._blocks) or self._open is not None:
                faults.add("blocks out of order")
            self._blocks.append({**block, "given": ""})
            self._open = len(self._blocks) - 1
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                return
            block_type, field = _DELTAS[delta["type"]]
            if self._open is None or event["index"] != self._open:
                faults.add("delta outside its block")
            elif self._blocks[self._open]["type"] != block_type:
                faults.add("delta of another block's kind")
            else:
                self._blocks[self._open]["given"] += delta[field]
        elif kind == "content_block_stop":
            if event["index"] != self._open:
                faults.add("blocks out of order")
            self._open = None
        elif kind == "message_delta":
            stop = event["delta"].get("stop_reason")
            self.answer.finish = _STOPS.get(stop, stop)

    def whole(self, message: Json) -> ClientAnswer:
        """An answer without a stream; the same blocks, filled."""
        for index, block in enumerate(message["content"]):
            self.read({"type": "content_block_start", "index": index, "content_block": block})
            self.read({"type": "content_block_stop", "index": index})
        stop = str(message.get("stop_reason"))
        self.answer.finish = _STOPS.get(stop, stop)
        self._seen = ["message_start", "message_stop"]
        return self.ended()

    def ended(self) -> ClientAnswer:
        """The blocks as an answer; an end that never came is a fault."""
        if self._seen.count("message_start") != 1 or self._seen[0] != "message_start":
            self.answer.faults.add("no single start")
        if self._open is not None or self._seen[-1:] != ["message_stop"]:
            self.answer.faults.add("not closed")
        for block in self._blocks:
            if block["type"] == "thinking":
                self.answer.reasoning += block["thinking"] + block["given"]
            elif block["type"] == "text":
                self.answer.content += block["text"] + block["given"]
            else:
                # without deltas the input is that of the block's start
                arguments = block["given"] or json.dumps(block.get("input") or {})
                self.answer.names.append(block["name"])
                self.answer.arguments.append(arguments)
                self.answer.ids.append(block["id"])
        return self.answer


class ResponsesReader:
    """Reads the events of /v1/responses. Some clients add up deltas, others (Codex) take finished
    items, others the response at the end: all three must be the same."""

    def __init__(self) -> None:
        self.answer = ClientAnswer()
        self._added: dict[int, Json] = {}
        self._done: list[Json] = []
        self._final: Json | None = None
        self._numbers: list[int] = []

    def read(self, event: Json) -> None:
        kind, faults = event["type"], self.answer.faults
        self._numbers.append(event.get("sequence_number", len(self._numbers)))
        if kind == "response.output_item.added":
            if event["output_index"] != len(self._added):
                faults.add("items out of order")
            self._added[event["output_index"]] = {**event["item"], "given": ""}
        elif kind.endswith((".delta",)):
            item = self._added.get(event["output_index"])
            if item is None or event.get("item_id") not in (item.get("id"), None):
                faults.add("delta outside its item")
            else:
                item["given"] += event["delta"]
        elif kind == "response.output_item.done":
            self._done.append(event["item"])
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            self._final = event["response"]

    def whole(self, response: Json) -> ClientAnswer:
        """A response without a stream."""
        self._final = response
        self._put(response["output"], given=False)
        return self._stopped()

    def ended(self) -> ClientAnswer:
        """What deltas add up to; faults where finished items or the response differ from it."""
        self._put(list(self._added.values()), given=True)
        for name, items in {
            "finished items differ": self._done,
            "final response differs": (self._final or {}).get("output", []),
        }.items():
            other = ResponsesReader()
            other._put(items, given=False)
            # ids too: a call is answered by the id of whichever a client read
            if (other.answer.parts(), other.answer.ids) != (self.answer.parts(), self.answer.ids):
                self.answer.faults.add(name)
        if self._numbers != list(range(len(self._numbers))):
            self.answer.faults.add("events are not counted")
        return self._stopped()

    def _put(self, items: list[Json], given: bool) -> None:
        for item in items:
            if item["type"] == "function_call":
                self.answer.names.append(item["name"])
                self.answer.arguments.append(item["given"] if given else item["arguments"])
                self.answer.ids.append(item["call_id"])
                continue
            parts: list[Any] = [*(item.get("content") or []), *(item.get("summary") or [])]
            text = item["given"] if given else "".join(part["text"] for part in parts)
            if item["type"] == "reasoning":
                self.answer.reasoning += text
            else:
                self.answer.content += text

    def _stopped(self) -> ClientAnswer:
        status = (self._final or {}).get("status", "no end")
        done = "tool_calls" if self.answer.names else "stop"
        self.answer.finish = {"completed": done, "incomplete": "length"}.get(status, status)
        return self.answer
