"""What the endpoints of both engines share: how their answers are read, and what they are asked.

The endpoint's own generator runs, from what the detokenizer hands it to the lines that a client
reads: which parser a request gets, what happens at its end, and every id and finish reason are the
engine's. Its server, scheduler and model are not there.
"""

from __future__ import annotations

import importlib
import json
from typing import Any, Protocol

from .answers import ClientAnswer, Json

NATIVE = "native"  # an answer in the model's own format


class NoEndpoint(Exception):
    """This version of the engine has no such endpoint."""


class EventReader(Protocol):
    """Puts an answer together from events."""

    def read(self, event: Json) -> None: ...

    def ended(self) -> ClientAnswer: ...


def tool_choice(case: Json, named: Json) -> Any:
    """`auto`, `required`, or the tool that the truth calls, as the API writes a named one."""
    if case["tool_choice"] != "named":
        return case["tool_choice"]
    name = case["truth"]["calls"][0]["name"]
    return json.loads(json.dumps(named).replace("$name", name))


def response_tools(case: Json) -> list[Json]:
    """The tools as /v1/responses takes them: without a level of nesting."""
    return [{"type": "function", **tool["function"]} for tool in case["tools"]]


def message_request(case: Json) -> Json:
    """A request to /v1/messages that allows a thought, where the model's are read."""
    tools = [
        {"name": f["name"], "description": f["name"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in case["tools"])
    ]
    request = {
        "model": "m",
        "max_tokens": 1 << 16,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
        "stream": True,
    }
    if case["parsers"].get("reasoning_parser"):
        request["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    return request


def let_through(case: Json, form: str, kind: str, grammar: Any) -> None:
    """Raises where the engine's own grammar does not let the case's answer through: no model would
    write it then, and what the parser makes of it says nothing."""
    text = case["forms"].get(form) or case["text"]
    text = text.removeprefix(case["thought"])
    xgrammar: Any = importlib.import_module("xgrammar")
    made: Any
    if kind == "json_schema":
        made = xgrammar.Grammar.from_json_schema(json.dumps(grammar))
    else:
        made = xgrammar.Grammar.from_structural_tag(grammar)
    accepts = importlib.import_module("xgrammar.testing")._is_grammar_accept_string
    if not accepts(made, text):
        raise ValueError(f"the engine's grammar does not let this answer through: {text[:120]}")


def finished(coroutine: Any) -> Any:
    """Runs what never waits for anything; a loop for each would take most of the time."""
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        return stopped.value
    raise RuntimeError("the endpoint waits for something that is not there")


def read_stream(events: Any, client: EventReader) -> ClientAnswer:
    """Reads server-sent events as a client does; vLLM's newest come as objects."""

    async def read() -> None:
        async for sent in events:
            lines = sent if isinstance(sent, str) else f"data: {sent.model_dump_json()}"
            for line in lines.splitlines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("error") or event.get("type") == "error":
                    raise RuntimeError(str(event["error"]))
                client.read(event)

    finished(read())
    return client.ended()


def plain_message(message: Any) -> Json:
    """A message as a chat template sees it."""
    given = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    plain: Json = json.loads(json.dumps(given, default=list))
    return plain
