"""A small brain for the model server: it reads what it is asked, as any model would.

It knows sums, stories with numbers, counting, a few languages, needles in a text, two phrases of
programming, and how to fill a JSON schema or a tool's parameters from a sentence. It does not know
who asks.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_NUMBER_WORDS = {
    "English": "one two three four five six seven",
    "German": "eins zwei drei vier fünf sechs sieben",
    "Russian": "один два три четыре пять шесть семь",
    "Greek": "ένα δύο τρία τέσσερα πέντε έξι επτά",
    "Chinese": "一 二 三 四 五 六 七",
}
_CODE = {
    "sum of the squares": "return sum(i * i for i in range(1, n + 1))",
    "sum of the decimal digits": "return sum(int(digit) for digit in str(n))",
}
_SUBJECTS = ("The harbour", "A fisherman", "The first ferry", "Every gull", "An old crane")
_VERBS = ("waits for", "greets", "slowly wakes", "watches", "leaves behind")
_OBJECTS = ("the morning tide", "a row of boats", "the quiet pier", "grey water", "the market")


def chance(*parts: object) -> int:
    """A number that follows from its parts, the same on every machine."""
    return crc32(repr(parts).encode())


def solve(text: str, seed: object = 0) -> str:
    """An answer in text."""
    if found := re.search(r"What is (-?\d+) ([-+*]) (-?\d+)\?", text):
        return str(_OPERATORS[found[2]](int(found[1]), int(found[3])))
    if asked := re.findall(r"What is the secret number of (\w+)\?", text):
        needle = re.search(rf"The secret number of {asked[-1]} is (\d+)\.", text)
        return needle[1] if needle else "I do not know that number."
    if asked := re.findall(r"What is the code of record (\S+)\?", text):
        needle = re.search(rf"Record {asked[-1]}: code (\d+)\.", text)
        return needle[1] if needle else "There is no such record."
    if found := re.search(r"numbers from (\d+) to (\d+) as words in (\w+)", text):
        words = _NUMBER_WORDS[found[3]].split()[int(found[1]) - 1 : int(found[2])]
        return ", ".join(words)
    if found := re.search(r"numbers from (\d+) to (\d+) in digits", text):
        return ", ".join(str(n) for n in range(int(found[1]), int(found[2]) + 1))
    if "How many" in text:
        return f"That makes {_story(text)}."
    if found := re.search(r"Python function `(\w+)\(n\)` that returns (.*?)\.", text):
        body = next(code for phrase, code in _CODE.items() if phrase in found[2])
        return f"```python\ndef {found[1]}(n):\n    {body}\n```"
    if "Invent" in text:
        known = (*_SUBJECTS, *_VERBS, *_OBJECTS)
        return " ".join(known[chance("ship", seed, n) % len(known)] for n in range(6)) + "."
    if "random number" in text:
        return str(chance("random", seed) % 1_000_000 + 1)
    return _prose(text)


def _story(text: str) -> int:
    """The numbers of a story, joined by what happens."""
    boxes, each = (int(n) for n in re.findall(r"(\d+) boxes with (\d+)", text)[0])
    given = sum(map(int, re.findall(r"gives away (\d+)", text)))
    bought = sum(map(int, re.findall(r"buys (\d+)", text)))
    return boxes * each - given + bought


def _prose(text: str) -> str:
    if "hello" in text:
        return "Hello there, it is good to meet you today."
    if "yes" in text:
        return "Yes, of course."
    sentences = [
        f"{_SUBJECTS[n % 5]} {_VERBS[chance(text, n) % 5]} {_OBJECTS[chance(n, text) % 5]}."
        for n in range(6)
    ]
    return " ".join(sentences)


def fill(schema: Mapping[str, Any], text: str, name: str = "") -> Any:
    """A value of a schema, from what a sentence says."""
    kind = schema["type"]
    if kind == "object":
        return {k: fill(s, text, k) for k, s in schema.get("properties", {}).items()}
    if "enum" in schema:
        return next((v for v in schema["enum"] if v in text), schema["enum"][0])
    if kind == "integer":
        return int(re.findall(r"\d+", text)[0])
    if kind == "array":
        listed = re.search(r"speaks ([^.]*)\.", text)
        return re.findall(r"[A-Z]\w+", listed[1]) if listed else []
    if quoted := re.search(r'"([^"]*)"', text):
        return quoted[1]
    if name == "name":
        after = re.search(r"guest ([A-Z]\w+)", text)
        return after[1] if after else re.findall(r"[A-Z]\w+", text)[0]
    return re.findall(r"\bin ([A-Z]\w+)", text)[0]


def choose_calls(tools: Sequence[Mapping[str, Any]], text: str) -> list[tuple[str, Any]]:
    """The calls that a request leads to: one for each place that it names.

    Whoever knows the tool says it: `Call Read with {"file_path": "note.txt"}`.
    """
    if told := re.search(r"Call (\w+) with (\{.*\})", text):
        names = [tool["function"]["name"] for tool in tools]
        return [(told[1], json.loads(told[2]))] if told[1] in names else []
    for tool in tools:
        function = tool["function"]
        subject = function["name"].split("_")[-1]
        if not re.search(rf"\b{subject}\b", text):
            continue
        schema = function["parameters"]
        cities = re.findall(r"\bin ([A-Z]\w+)", text)
        if "city" in schema["properties"] and len(cities) > 1:
            return [(function["name"], {"city": city}) for city in cities]
        return [(function["name"], fill(schema, text))]
    return []
