"""A sound streaming parser for any format of formats.yaml, and the same with a planted defect.

It owes nothing to an engine: a buffer, and regular expressions made of the format's own templates.
A call is emitted whole, once its end is there. Only the standard library is used: a copy of this
file is the parser of the tests' own little engine.
"""

from __future__ import annotations

import json
import re
from typing import Any

# What can be wrong, and the truth that shows it.
DEFECTS = {
    "name without hyphens": "hyphen-name",
    "arguments on one line": "two-lines",
    "drops content before a call": "content-call",
    "second arguments twice": "two-calls",
    "loses the second call of a step": "empty-twice",
    "content twice": "content-call",
    "shows the last marker": "call-no-think",
    "keeps what it held back": "ends-early",
    "sends a marker in pieces": "call-no-think",
    "no arguments": "empty-arguments",
    "finish reason": "call-no-think",
    "same id": "empty-twice",
    "counts from one": "call-no-think",
    "name twice": "call-no-think",
    "raises at a brace": "braces",
    "answer within reasoning": "think",
    "needs an empty end": "call-no-think",
    "true is 1": "nested",
    "loses other letters": "unicode",
}
# Formats that write each argument for itself have more to lose.
ELEMENT_DEFECTS = {
    "strips strings": "edge-space",
    "strings become numbers": "looks-like-number",
    "drops empty strings": "empty-string",
}
# Formats of messages with a channel and a recipient each can mix these up.
CHANNEL_DEFECTS = {
    "shows a thought": "think",
    "takes a preamble for a thought": "content-call",
    "waits for a thought": "plain",
    "waits for a thought before a call": "call-no-think",
    "name with its prefix": "hyphen-name",
    "name with its type": "call",
    "one call for each tool": "two-calls",
    "loses calls after a preamble": "three-kinds",
}
END = "<|end|>"  # of a message; what stops an answer ends its last one, too


def pattern(template: str, **groups: str) -> str:
    """A regular expression for a template: `$name` becomes the group of that name."""
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{groups[name]})"

    return re.sub(r"\\\$(\w+)", group, re.escape(template))


class Reference:
    """Reads an answer step by step; `calls` are (index, name, arguments) or part of that."""

    def __init__(
        self, form: dict[str, Any], tools: dict[str, Any], defect: str = "", *, thinks: bool = True
    ) -> None:
        self.form, self.tools, self.defect = form, tools, defect
        self.buffer, self.count = "", 0
        self.phase = "think" if form["opened_by"] == "template" else "begin"
        # the template has closed the thought
        if not thinks and defect != "takes an answer for a thought":
            self.phase = "content"
        name = r"[\w.]+" if defect == "name without hyphens" else r"[\w.-]+"
        flags = re.NOFLAG if defect == "arguments on one line" else re.DOTALL
        self.tail = END if form["ends"] else ""
        call = form["call"] + self.tail
        if defect == "name with its prefix":
            call = call.replace("functions.$name", "$name")
        if defect == "name with its type":
            call, name = re.sub(r"\$name.*<\|message", "$name<|message", call), ".+?"
        self.call = re.compile(pattern(call, name=name, index=r"\d+", arguments=".*?"), flags)
        groups = {"key": r"[^\"<>\n]+", "value": ".*?", "is_string": "true|false"}
        self.argument = re.compile(pattern(form["argument"] or "$value", **groups), flags)
        # what stands before the first call: of the section, or of a call itself
        section = form["calls"].partition("$calls")[0]
        self.opening = section or form["call"].partition("$")[0]
        self.closing = form["calls"].partition("$calls")[2]
        # of messages with a channel each: how those begin that are content
        texts = [form["content"], form["preamble"] or form["content"]]
        self.heads = [each.partition("$content")[0] for each in texts]

    def feed(self, text: str, *, final: bool) -> dict[str, Any]:
        """What one step adds: reasoning, content, calls."""
        out: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
        for stop in self.form["ends"] or ():
            text = text.replace(stop, END)
        self.buffer += text
        if self.defect == "loses other letters":
            self.buffer = self.buffer.replace("é", "")
        if self.phase == "begin":
            opening = self.form["thinking"][0]
            if len(self.buffer) < len(opening) and not final:
                return out
            waits = self.form["empty_thought"] or self.defect.startswith("waits for a thought")
            self.phase = "think" if waits or self.buffer.startswith(opening) else "content"
            self.buffer = self.buffer.removeprefix(opening)
        if self.phase == "think":
            out["reasoning"], is_over = self._until(self.form["thinking"][1], final)
            self.phase = "content" if is_over else "think"
            if self.defect == "shows a thought":
                out["content"], out["reasoning"] = out["reasoning"], ""
            if is_over and self.defect == "answer within reasoning" and self.buffer:
                out["reasoning"], self.buffer = out["reasoning"] + self.buffer, ""
        if self.phase == "content" and self.heads[0]:
            heads = [*self.heads, self.opening]
            head = next((each for each in heads if self.buffer.startswith(each)), None)
            # a piece of a header does not tell yet what it is
            if head is None and not final:
                return out
            self.phase = "calls" if head == self.opening else "message"
            if self.phase == "message":
                self.buffer = self.buffer.removeprefix(head or "")
        if self.phase in ("content", "message"):
            kept, is_message = self.buffer, self.phase == "message"
            said, is_over = self._until(END if is_message else self.opening, final)
            out["content"] += said
            self.phase = "calls" if is_over else self.phase
            if is_over:
                self.buffer = ("" if is_message else self.opening) + self.buffer
                if self.defect == "loses calls after a preamble" and is_message:
                    self.phase = "none"
                if self.defect == "drops content before a call":
                    out["content"] = ""
            if self.defect == "content twice" and kept:
                out["content"] *= 2
            if self.defect == "takes a preamble for a thought":
                out["reasoning"], out["content"] = out["reasoning"] + out["content"], ""
            if self.defect == "raises at a brace" and "{" in out["content"]:
                raise ValueError("a brace")
        if self.phase == "calls":
            out["calls"] = self._calls()
            # of formats without a section, the end of a call
            is_last = self.closing in self.buffer if self.closing else bool(out["calls"])
            if self.defect == "shows the last marker" and is_last:
                last = self.closing or self.form["call"].rpartition("$arguments")[2] or self.tail
                out["content"], self.buffer = out["content"] + last, ""
            if self.defect == "needs an empty end" and final and text:
                out["calls"] = []
        return out

    def _until(self, marker: str, final: bool) -> tuple[str, bool]:
        """Everything before a marker, and whether it came; a piece of it is held back."""
        text, found, rest = self.buffer.partition(marker)
        if found:
            self.buffer = rest
            return text, True
        held = 0 if self.defect == "sends a marker in pieces" else len(marker) - 1
        sizes = range(min(held, len(text)), 0, -1)
        size = next((n for n in sizes if marker.startswith(text[len(text) - n :])), 0)
        if final and self.defect != "keeps what it held back":
            size = 0
        self.buffer = text[len(text) - size :]
        return text[: len(text) - size], False

    def _calls(self) -> list[tuple[int, str | None, str]]:
        calls: list[tuple[int, str | None, str]] = []
        while match := self.call.search(self.buffer):
            self.buffer = self.buffer[match.end() :]
            given = match["arguments"]
            if self.form["argument"] is not None:
                given = json.dumps(self._elements(match["name"], given))
            if self.defect == "true is 1":
                given = re.sub(r"\btrue\b", "1", given)
            if self.defect == "no arguments" and given.strip() == "{}":
                given = ""
            if self.defect == "one call for each tool" and self.count:
                calls.append((0, None, given))
                continue
            index = self.count + (self.defect == "counts from one")
            if self.defect != "loses the second call of a step" or not calls:
                calls.append((index, match["name"], given))
            self.count += 1
        if self.defect == "second arguments twice":
            calls = [(index, name, calls[-1][2]) for index, name, _ in calls]
        if self.defect == "name twice":
            calls = [each for call in calls for each in (call, (call[0], call[1], ""))]
        return calls

    def _elements(self, tool: str, text: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for match in self.argument.finditer(text):
            key, value = match["key"], match["value"]
            is_string = self.tools[tool].get(key) == "string"
            if self.defect == "strips strings":
                value = value.strip()
            if self.defect == "strings become numbers" and re.fullmatch(r"\d+|true", value):
                is_string, value = False, value.lstrip("0")
            if self.defect == "drops empty strings" and not value:
                continue
            values[key] = value if is_string else json.loads(value)
        return values
