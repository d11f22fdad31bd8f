"""Conversations that try a chat template: the same for every model, written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# How the templates of Qwen, GLM, DeepSeek and Kimi name the same switch.
THINKING = ("enable_thinking", "thinking")
# A picture of one point, as an address that holds its own bytes (PNG).
_POINT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8A"
    "AAAASUVORK5CYII="
)


@dataclass(frozen=True)
class Conversation:
    """One request: messages, tools, and switches of the template."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    has_picture: bool = False  # a template does not decide how many tokens one takes

    @property
    def slug(self) -> str:
        """Its name in the name of a case: `late-system-turn`."""
        return self.name.replace(": ", "-").replace(" ", "-")


def _turns(*texts: str) -> list[dict[str, Any]]:
    """Turns of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def _tool(name: str, about: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": sorted(properties)[:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


def _called(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    # the form of ids that Kimi was trained on; others take any
    return {"id": f"functions.{name}:{number}", "type": "function", "function": function}


WEATHER = _tool(
    "get_weather",
    "The weather in a city, <now> & here",
    city={"type": "string", "description": "Name of the city"},
    unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
)
FERRY = _tool("book-ferry", "Books a place on a ferry", persons={"type": "integer", "minimum": 1})
_SYSTEM = {"role": "system", "content": "You are a harbour master. Answer in one sentence."}
_ASKED = {"role": "user", "content": "What is the weather in Łódź, and is there a ferry for 3?"}


def _result(name: str, text: str, number: int = 0) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"functions.{name}:{number}",
        "name": name,
        "content": text,
    }


_ONE_CALL = [_called("get_weather", '{"city": "Łódź", "unit": "celsius"}')]
_TWO_CALLS = [*_ONE_CALL, _called("book-ferry", '{"persons": 3}', 1)]
_CALLED = {"role": "assistant", "content": "", "tool_calls": _ONE_CALL}
_TEXTS = {
    "one word": "Hello",
    "spaces and lines": "  two  spaces,\n\n\ta tab,\n and an end \n",
    "scripts": "Grüße, 你好, привет, שלום, مرحبا, e\u0301, 👩\u200d🚢, ﬁn",
    "code": "def f(x):\n    return {'a': [1, 2.50, -3e-7], \"b\": x}  # 1234567890\n",
    "markup": "{{ messages }} {% raw %} <b>&amp;</b> [INST] \\n </s",
    "long": "The ferry leaves the harbour at nine and comes back at noon. " * 60,
}


def conversations() -> list[Conversation]:
    """All of them, the simplest first."""
    found = [Conversation(f"text: {name}", _turns(text)) for name, text in _TEXTS.items()]
    several = _turns("Is there a ferry?", "Yes, at nine.", "And back?", "At noon.", "Book it.")
    thought = {"role": "assistant", "content": "Yes, at nine.", "reasoning_content": "Let me see."}
    found += [
        Conversation("system", [_SYSTEM, *_turns("Is there a ferry?")]),
        Conversation("several turns", several),
        Conversation("system and several turns", [_SYSTEM, *several]),
        Conversation("late system turn", [*several[:2], _SYSTEM, several[2]]),
        Conversation("reasoning of an earlier turn", [several[0], thought, several[2]]),
        Conversation("tool", _turns("What is the weather in Oslo?"), [WEATHER]),
        Conversation("tools and system", [_SYSTEM, _ASKED], [WEATHER, FERRY]),
        Conversation(
            "tool result", [_ASKED, _CALLED, _result("get_weather", "Rain, 17 °C")], [WEATHER]
        ),
        Conversation(
            "two calls and their results",
            [
                _ASKED,
                {"role": "assistant", "content": "I look at both.", "tool_calls": _TWO_CALLS},
                _result("get_weather", '{"sky": "rain", "degrees": 17}'),
                _result("book-ferry", "booked", 1),
            ],
            [WEATHER, FERRY],
        ),
        Conversation(
            "turns after a tool result",
            [
                _SYSTEM,
                _ASKED,
                _CALLED,
                _result("get_weather", "Rain, 17 °C"),
                {"role": "assistant", "content": "It rains, at 17 °C."},
                {"role": "user", "content": "Thank you. And tomorrow?"},
            ],
            [WEATHER],
        ),
    ]
    for is_on in (True, False):
        name = f"thinking {'on' if is_on else 'off'}"
        switches = dict.fromkeys(THINKING, is_on)
        found.append(Conversation(name, _turns("How far is it to Oslo?"), options=switches))
    seen = [
        {"type": "text", "text": "What is in this picture?"},
        {"type": "image_url", "image_url": {"url": _POINT}},
    ]
    picture = [{"role": "user", "content": seen}]
    return [*found, Conversation("picture", picture, has_picture=True)]
