"""Faults to plant in the server, each with the part that must see it, and sound manners."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

from tests.testbed.quality_server import QualityFault, follows

Call = tuple[str, str]


def _every(
    nth: int, change: Callable[[Call], Call | None], only_streams: bool = False
) -> Callable[[Call, int, bool], Call | None]:
    def call(given: Call, number: int, is_stream: bool) -> Call | None:
        hit = number % nth == 0 and (is_stream or not only_streams)
        return change(given) if hit else given

    return call


def _first_field_lost(call: Call) -> Call:
    value = json.loads(call[1])
    return call[0], json.dumps(dict(list(value.items())[1:]))


def _other_type(call: Call) -> Call:
    value = json.loads(call[1])
    first = next(iter(value))
    value[first] = [[value[first]]]
    return call[0], json.dumps(value)


def _no_hyphens(given: Call, *_: Any) -> Call | None:
    """As parsers do whose pattern of names has no hyphen."""
    return None if "-" in given[0] else given


def _no_lines(given: Call, *_: Any) -> Call:
    return given[0], given[1].replace("\\n", "\n")


def _blurred(nats: float) -> Callable[[dict[str, float], str], dict[str, float]]:
    """Every logit off by some noise, as a bad kernel or a coarse format makes it."""

    def logits(known: dict[str, float], text: str) -> dict[str, float]:
        dice = Random(f"noise {text}")
        raw = {word: value + dice.gauss(0, nats) for word, value in known.items()}
        most = math.log(sum(math.exp(value) for value in raw.values()))
        return {word: value - most for word, value in raw.items()}

    return logits


def _swapped(share: float, ends: str = "") -> Callable[[dict[str, float], str], dict[str, float]]:
    """The first and the last change places now and then."""

    def logits(known: dict[str, float], text: str) -> dict[str, float]:
        if Random(f"swap {text}").random() >= share or not text.endswith(ends):
            return known
        ordered = sorted(known, key=lambda word: known[word])
        swapped = {ordered[0]: ordered[-1], ordered[-1]: ordered[0]}
        return {word: known[swapped.get(word, word)] for word in known}

    return logits


def _without(role: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def body(given: dict[str, Any]) -> dict[str, Any]:
        kept = [m for m in given["messages"] if m["role"] != role]
        return {**given, "messages": kept or given["messages"]}

    return body


def _late_turns_first(given: dict[str, Any]) -> dict[str, Any]:
    """System turns are joined into one at the beginning, and a line stands between them."""
    system = [m for m in given["messages"] if m["role"] == "system"]
    others = [m for m in given["messages"] if m["role"] != "system"]
    if len(system) == 1 and given["messages"][0] is not system[0]:
        others = [{**system[0], "content": f"\n\n{system[0]['content']}"}, *others]
        return {**given, "messages": others}
    return given


def _sorted_tools(given: dict[str, Any]) -> dict[str, Any]:
    """Tools go through a model that adds its defaults."""
    tools = [
        {**tool, "function": {**tool["function"], "strict": False}}
        for tool in given.get("tools") or []
    ]
    return {**given, "tools": tools} if tools else given


TOKEN_FAULTS = [
    QualityFault("off by a constant", "tokens", count=lambda n, _: n + 3),
    QualityFault("off by one", "tokens", count=lambda n, _: n + 1),
    QualityFault("less by one", "tokens", count=lambda n, _: n - 1),
    QualityFault("off with tools", "tokens", count=lambda n, b: n + 7 * bool(b.get("tools"))),
    QualityFault("off in streams", "tokens", count=lambda n, b: n + bool(b.get("stream"))),
    QualityFault("system turn lost", "tokens", body=_without("system")),
    QualityFault("tool result lost", "tokens", body=_without("tool")),
    QualityFault("late system turn moved", "tokens", body=_late_turns_first),
    QualityFault("fields added to tools", "tokens", body=_sorted_tools),
    QualityFault("thinking switch lost", "tokens",
                 body=lambda b: {**b, "chat_template_kwargs": {}}),
    QualityFault("tools lost", "tokens", body=lambda b: {**b, "tools": None}),
    QualityFault("rounded up to blocks", "tokens", count=lambda n, _: -(-n // 16) * 16),
    QualityFault("no usage", "tokens", has_usage=False),
]  # fmt: skip
SCHEMA_FAULTS = [
    QualityFault("broken once in ten", "schema", call=_every(10, _first_field_lost)),
    QualityFault("other type once in ten", "schema", call=_every(10, _other_type)),
    QualityFault("cut once in ten", "schema", call=_every(10, lambda c: (c[0], c[1][:-1]))),
    QualityFault("cut in streams", "schema",
                 call=_every(5, lambda c: (c[0], c[1][:-1]), only_streams=True)),
    QualityFault("no call once in ten", "schema", call=_every(10, lambda c: None)),
    QualityFault("other tool once in ten", "schema", call=_every(10, lambda c: ("search", c[1]))),
    QualityFault("names with hyphens lost", "schema", call=_no_hyphens),
    QualityFault("lines not escaped", "schema", call=_no_lines),
    QualityFault("arguments doubled", "schema", call=_every(8, lambda c: (c[0], c[1] * 2))),
    QualityFault("arguments as text", "schema",
                 call=_every(8, lambda c: (c[0], json.dumps(c[1])))),
    QualityFault("finish is stop", "schema", finish="stop"),
]  # fmt: skip
AGREEMENT_FAULTS = [
    QualityFault("other logits", "agreement", logits=lambda _, text: follows(text, "other")),
    QualityFault("noise of a nat", "agreement", logits=_blurred(1.0)),
    QualityFault("noise of half a nat", "agreement", logits=_blurred(0.5)),
    QualityFault("swapped once in eight", "agreement", logits=_swapped(0.125)),
    QualityFault("wrong after marks", "agreement", logits=_swapped(1.0, ends=">")),
    QualityFault("flat", "agreement", logits=lambda k, _: dict.fromkeys(k, -math.log(len(k)))),
    QualityFault("NaN", "agreement", is_nan=True),
    QualityFault("NaN, as chats have it", "agreement", is_nan=True, writes_legacy=False),
    QualityFault("no log probabilities", "agreement", has_logprobs=False),
]
FAULTS = [*TOKEN_FAULTS, *SCHEMA_FAULTS, *AGREEMENT_FAULTS]


def _as_float(given: Call, *_: Any) -> Call:
    """Whole numbers as 40.0, which JSON schema takes for integers."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(each) for name, each in value.items()}
        if isinstance(value, list):
            return [changed(each) for each in value]
        return float(value) if type(value) is int else value

    return given[0], json.dumps(changed(json.loads(given[1])))


SOUND = [
    *(QualityFault("none", part) for part in ("tokens", "schema", "agreement")),
    QualityFault("log probabilities as chats have them", "agreement", writes_legacy=False),
    QualityFault("whole numbers as floats", "schema", call=_as_float),
    QualityFault("spaces in arguments", "schema",
                 call=lambda c, *_: (c[0], json.dumps(json.loads(c[1]), indent=2))),
    QualityFault("escaped arguments", "schema",
                 call=lambda c, *_: (c[0], json.dumps(json.loads(c[1])))),
    QualityFault("a little noise", "agreement", logits=_blurred(0.05)),
    QualityFault("one broken call in four hundred", "schema", call=_every(400, _first_field_lost)),
]  # fmt: skip
