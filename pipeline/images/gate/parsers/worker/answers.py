"""What a client puts together from a stream, and how that differs from what the model meant."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]


class ClientAnswer:
    """Reasoning, content and tool calls, added up from deltas as OpenAI's clients do."""

    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.names: list[str] = []
        self.arguments: list[str] = []
        self.ids: list[str] = []
        self.finish: str | None = None
        self.faults: set[str] = set()  # what no client can put together

    def add(self, choice: Json) -> None:
        """One choice of a chunk, or of a whole answer: its message has the same fields."""
        delta = choice.get("delta") or choice.get("message") or {}
        self.finish = choice.get("finish_reason") or self.finish
        # the engines have two names for it
        self.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        self.content += delta.get("content") or ""
        for place, call in enumerate(delta.get("tool_calls") or []):
            # calls of an answer without a stream need no index
            index = place if call.get("index") is None else call["index"]
            if index > len(self.names):
                self.faults.add("index skipped")
            for parts in (self.names, self.arguments, self.ids):
                parts += [""] * (index + 1 - len(parts))
            function = call.get("function") or {}
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            if name and self.names[index]:
                self.faults.add("second name")
            if arguments and not (self.names[index] or name):
                self.faults.add("arguments before name")
            self.names[index] += name
            self.arguments[index] += arguments
            self.ids[index] = self.ids[index] or call.get("id") or ""

    def parts(self) -> tuple[Any, ...]:
        """What must be the same however an answer was cut."""
        texts = (self.reasoning.strip(), self.content.strip())
        # a parser may hold back a space, which can be the format's
        arguments = tuple(text.rstrip() for text in self.arguments)
        return (*texts, tuple(self.names), arguments, tuple(sorted(self.faults)))

    def shown(self) -> Json:
        """The parts that are not empty, for people."""
        kept = {k: getattr(self, k) for k in ("reasoning", "content", "names", "arguments")}
        return {key: value for key, value in kept.items() if value}


def differences(truth: Json, got: ClientAnswer, markers: list[str]) -> list[str]:
    """Names the fields that are not as meant; spaces around texts are the template's."""
    found = set(got.faults)
    for field in ("reasoning", "content"):
        if getattr(got, field).strip() != truth[field].strip():
            found.add(field)
    calls = truth["calls"]
    if got.names != [call["name"] for call in calls]:
        found.add("names")
    for given, call in zip(got.arguments, calls, strict=False):
        try:
            # compared as text: to Python, true is 1
            if _written(json.loads(given, parse_float=_number)) != _written(call["arguments"]):
                found.add("arguments")
        except ValueError:
            found.add("arguments are not JSON")
    if not all(got.ids) or len(set(got.ids)) < len(got.ids):
        found.add("ids")
    # of a tool that the request named, OpenAI's own API says "stop"
    if got.finish not in (truth.get("finish") or ["tool_calls" if calls else "stop"]):
        found.add("finish reason")
    meant = truth["reasoning"] + truth["content"]
    if any(m in got.reasoning + got.content and m not in meant for m in markers):
        found.add("marker shown")
    return sorted(found)


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _number(text: str) -> float | int:
    """JSON has one kind of number: 40.0 is 40."""
    number = float(text)
    return int(number) if number.is_integer() else number
