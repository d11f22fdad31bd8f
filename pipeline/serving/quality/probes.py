"""Fixed texts for the agreement: conversations as the model's template writes them, cut at places.

A place is judged by what the model says comes next. Marks of turns and tools, and the syntax of
calls, are protocol: a model that is right in prose and wrong there is of no use to an agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from pipeline.images.gate.templates.cases import FERRY, WEATHER
from pipeline.images.gate.templates.files import ModelText
from pipeline.images.gate.templates.renderer import TemplateRefused

# Marks whole, words with the space before them: most tokenizers begin a token there.
_PIECE = re.compile(r"<[^<>\s]{1,60}>|\s*[^\W\d_]+|\s*\d|\s*[^\w\s]|\s+|_")
_CITIES = ("Oslo", "Bergen", "Kiel", "Turku", "Riga", "Gdynia", "Tallinn", "Aarhus", "Visby")
_CARGO = ("timber", "grain", "salt", "engine parts", "paper", "fish", "steel wire", "oranges")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Probe(NamedTuple):
    """A text, and the places in it: where each is, and whether protocol follows."""

    text: str
    places: tuple[tuple[int, bool], ...]


def probes(model: ModelText | None, texts: int, places: int, seed: int) -> list[Probe]:
    """Makes so many texts; without a template they are plain, and hold no protocol."""
    made = []
    for number in range(texts):
        dice = Random(f"{seed}-{number}")  # noqa: S311 - texts, no secrets
        question, answer, contents = _exchange(dice, number)
        start, text = question["content"] + "\n", question["content"] + "\n" + answer["content"]
        if model is None:
            contents = [text]
        else:
            try:
                tools = [WEATHER, FERRY] if answer.get("tool_calls") else None
                start = model.render([question], tools)
                text = model.render([question, answer], tools, add_generation_prompt=False)
                if tools and contents[0] not in text[len(start) :]:
                    # a template without calls: prose in their place
                    question, answer, contents = _exchange(dice, number + 1)
                    start = model.render([question])
                    text = model.render([question, answer], add_generation_prompt=False)
            except TemplateRefused:
                # the plain text is a text, too
                contents = [text]
        # a generation prompt may open a thought that a finished turn does not have
        pairs = enumerate(zip(start, text, strict=False))
        begin = next((n for n, (a, b) in pairs if a != b), min(len(start), len(text)))
        spans = [found.span() for part in contents for found in re.finditer(re.escape(part), text)]
        found = [
            (piece.start(), not any(a <= piece.end() - 1 < b for a, b in spans))
            for piece in _PIECE.finditer(text, begin)
        ]
        protocol = [place for place in found if place[1]]
        prose = [place for place in found if not place[1]]
        # half of them protocol, where there is as much; more where there is no other
        marks = min(len(protocol), max(places // 2, places - len(prose)))
        chosen = [*_spread(protocol, marks), *_spread(prose, places - marks)]
        made.append(Probe(text, tuple(sorted(chosen))))
    return made


def _exchange(dice: Random, number: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A question, an answer, and which of its words are content."""
    city, other = dice.sample(_CITIES, 2)
    cargo, day, count = dice.choice(_CARGO), dice.choice(_DAYS), dice.randint(2, 60)
    if number % 3 == 0:
        question = f"What is the weather in {city}? We are {count} persons and go on {day}."
        calls: list[tuple[str, dict[str, Any]]] = [
            ("get_weather", {"city": city, "unit": "celsius"}),
            ("book-ferry", {"persons": count}),
        ]
        name, arguments = dice.choice(calls)
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": f"functions.{name}:0", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        parts = [name, *(str(part) for item in arguments.items() for part in item)]
        return {"role": "user", "content": question}, answer, parts
    if number % 3 == 1:
        question = f"How much {cargo} goes from {city} to {other} on {day}?"
        text = (
            f"On {day} the ship takes {count} tons of {cargo} from {city} to {other}. It leaves in"
            f" the morning and arrives after {count % 20 + 3} hours, so the crew of {other} unloads"
            f" it in the evening."
        )
    else:
        question = f"Write a Python function that adds {count} to each weight of {cargo}."
        text = (
            f"def add_weight(weights):\n    return [weight + {count} for weight in weights]\n\n"
            f"print(add_weight([1, 2, 3]))  # [{count + 1}, {count + 2}, {count + 3}]"
        )
    return {"role": "user", "content": question}, {"role": "assistant", "content": text}, [text]


def _spread(places: Sequence[tuple[int, bool]], most: int) -> Iterator[tuple[int, bool]]:
    """Picks so many of them, evenly from the first to the last."""
    count = min(most, len(places))
    for n in range(count):
        yield places[n * (len(places) - 1) // max(1, count - 1)]
