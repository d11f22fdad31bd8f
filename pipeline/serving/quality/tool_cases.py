"""Tool calls to ask for: drawn from a seed here, or read from a folder in Moonshot's forms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pipeline.core.errors import InputInvalid
from pipeline.core.foreign_json import JsonInvalid, read_json

# Words of tools and their fields: hyphens, digits and other scripts are where parsers lose calls.
_VERBS = ("get", "book", "list-all", "set_up", "find2", "cancel")
_THINGS = ("weather", "ferry", "berth-plan", "crane_shift", "tide", "customs-form", "pilot")
_FIELDS = (
    *("city", "persons", "e-mail", "is_open", "größe", "城市", "дата", "weight_kg", "x-ref"),
    *("from", "class", "type", "name", "arguments", "note", "id", "$filter", "tags", "über.Maß"),
)
_TEXTS = (
    *("Oslo", "Łódź", "北京", "a b", "O'Hara & Söhne", 'said "yes"', "50 %", "C:\\temp\\new"),
    *("two\nlines", "<b>bold</b>", "</tool_call>", "{not: json}", "null", "7"),
    *("👩‍🚢 crew", "naïve"),
)
_MOST_FILES, _MOST_LINE, _MOST_CASES = 1000, 4 << 20, 20_000
# what a schema alone may begin with
_SCHEMA_WORDS = {"type", "properties", "required", "anyOf", "oneOf", "allOf", "enum", "$ref"}


@dataclass(frozen=True)
class ToolCase:
    """A request that leads to one call."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    wanted: tuple[str, Any] | None = None  # the tool and its arguments, where they are known
    choice: str | None = None  # what the case itself demands

    def parameters(self, tool: str) -> Any:
        """The schema of a tool, or none where the request has no such tool."""
        for each in self.tools:
            function = each.get("function", each)
            if isinstance(function, Mapping) and function.get("name") == tool:
                return function.get("parameters") or {"type": "object"}
        return None


def tool_cases(count: int, seed: int) -> list[ToolCase]:
    """Draws so many cases; the same for the same seed on every machine."""
    cases = []
    for number in range(count):
        dice = Random(f"{seed}-{number}")  # noqa: S311 - cases, no secrets
        names = [f"{verb}_{thing}" for verb in _VERBS for thing in _THINGS]
        tools, chosen = [], dice.sample(names, dice.randint(1, 4))
        for name in chosen:
            # every second case has a shallow schema, as most tools have
            schema, value = _drawn(dice, "object", 1 + number % 2 * 2)
            function = {"name": name, "description": f"Tool {name}", "parameters": schema}
            tools.append({"type": "function", "function": function})
            wanted = name, value
        dice.shuffle(tools)
        text = json.dumps(wanted[1], ensure_ascii=False)
        prompt = f"Call the tool {wanted[0]} once, with exactly these arguments:\n{text}"
        case = ToolCase(f"case {number}", [{"role": "user", "content": prompt}], tools, wanted)
        cases.append(case)
    return cases


def _drawn(dice: Random, kind: str, depth: int) -> tuple[dict[str, Any], Any]:
    """Draws a schema and a value that fits it."""
    if kind == "object":
        fields = dice.sample(_FIELDS, dice.randint(1, 5))
        kinds = ["string", "integer", "number", "boolean", "enum", "array", "nullable"]
        drawn = {}
        for name in fields:
            may_nest = depth > 0 and dice.random() < 0.4
            drawn[name] = _drawn(dice, "object" if may_nest else dice.choice(kinds), depth - 1)
        # the first is always asked for; of the others some may be left out, and some are
        needed = [name for n, name in enumerate(fields) if n == 0 or dice.random() < 0.6]
        given = [name for name in fields if name in needed or dice.random() < 0.5]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: part for name, (part, _) in drawn.items()},
            "required": needed,
        }
        if dice.random() < 0.7:
            schema["additionalProperties"] = False
        return schema, {name: drawn[name][1] for name in given}
    if kind == "array":
        of = "object" if depth > 0 and dice.random() < 0.3 else dice.choice(["string", "integer"])
        items, first = _drawn(dice, of, depth - 1)
        # objects of one array have the same schema, so the same value stands twice
        others = [first if of == "object" else _drawn(dice, of, 0)[1] for _ in range(2)]
        values = [first, *others[: dice.randint(0, 2)]]
        if of == "integer":
            items, values = {"type": "integer"}, [int(v) for v in values]
        return {"type": "array", "items": items, "minItems": 1}, values
    text = dice.choice(_TEXTS)
    if kind == "enum":
        values = dice.sample(_TEXTS, 3)
        return {"type": "string", "enum": values}, dice.choice(values)
    if kind == "nullable":
        value = dice.choice([None, text])
        return {"anyOf": [{"type": "string"}, {"type": "null"}]}, value
    if kind == "integer":
        number = dice.randint(-5, 40)
        return {"type": "integer", "minimum": number - 3, "maximum": number + 100}, number
    if kind == "number":
        return {"type": "number"}, dice.randint(-9999, 9999) / 8
    if kind == "boolean":
        return {"type": "boolean"}, dice.random() < 0.5
    return {"type": "string", "minLength": 1}, text


def read_tool_cases(folder: Path) -> list[ToolCase]:
    """Cases of a folder, in the forms of Moonshot's verifiers; lines of other forms are errors.

    A line is a whole request (`messages`, `tools`), or a schema to call a tool with, by itself or
    under `schema`. https://github.com/MoonshotAI/K2-Vendor-Verifier (samples.jsonl),
    https://github.com/MoonshotAI/Kimi-Vendor-Verifier (validator_cases/*/valid.jsonl)
    """
    files = sorted(path for path in folder.rglob("*.jsonl") if path.name != "invalid.jsonl")
    cases: list[ToolCase] = []
    for path, number, line in _lines(files[:_MOST_FILES]):
        name = f"{path.relative_to(folder)}:{number}"
        try:
            value = read_json(line, most_bytes=_MOST_LINE, any_int=True)
        except JsonInvalid as error:
            raise InputInvalid(f"{folder}/{name}: {error}") from error
        given = value if isinstance(value, dict) else {}
        schema = given.get("schema", given)
        # a file of their results is no case
        if "response" in given:
            continue
        if isinstance(given.get("messages"), list):
            turns = [
                # their own name for it
                {**m, "role": "system" if m.get("role") == "_input" else m.get("role")}
                for m in given["messages"]
                if isinstance(m, dict)
            ]
            tools = [tool for tool in given.get("tools") or [] if isinstance(tool, dict)]
            cases.append(ToolCase(name, turns, tools, choice=given.get("tool_choice")))
            continue
        if not isinstance(schema, dict) or not _SCHEMA_WORDS & set(schema):
            raise InputInvalid(f"{folder}/{name}: is neither a request nor a schema")
        # a tool takes an object: other schemas are those of one field
        if schema.get("type", "object") != "object":
            schema = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
        tool = {"name": "fill_in", "description": "Takes values", "parameters": schema}
        prompt = "Call the tool fill_in once, with values of your own that fit its schema."
        turns = [{"role": "user", "content": prompt}]
        tools = [{"type": "function", "function": tool}]
        cases.append(ToolCase(name, turns, tools, choice="required"))
    if not cases:
        raise InputInvalid(f"{folder}: holds no case", "Name a folder with *.jsonl files of cases.")
    return cases[:_MOST_CASES]


def _lines(files: Sequence[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """Yields every line that is not empty, with its place; cuts one that is too long."""
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE + 1), b""), 1):
                if line.strip():
                    yield path, number, line.strip()
