"""Judges what `/v1/messages` makes of a conversation: nothing lost, and its beginning unchanged.

A server finds in its cache what begins as an earlier request did. An endpoint that moves a late
system turn to the front changes the beginning each time, and everything is computed again.
"""

from __future__ import annotations

import importlib
import json
from itertools import takewhile
from typing import Any, Protocol

from .answers import Json

_MOST_SHOWN = 400


class MessagesEndpoint(Protocol):
    """An engine's `/v1/messages` that serves a model with one chat template."""

    conversion: str  # the function of the engine that `convert` calls

    def convert(self, asked: Json) -> list[Json]:
        """A request as the chat messages that the template gets."""


def judge_conversation(case: Json, tokenizer: Any, endpoint: MessagesEndpoint) -> Json:
    """Sends every request of a conversation, and compares what the model would read."""
    conversation = case["conversation"]
    messages, template = conversation["messages"], conversation["template"]
    ends = [at for at, each in enumerate(messages) if each["role"] == "assistant" and at]
    faults: set[str] = set()
    answer: Json = {"streams": 0, "failed": 0, "token_by_token": False}
    before = ""
    for number, end in enumerate([*ends, len(messages)], 1):
        asked = {"model": "m", "max_tokens": 16, "system": conversation["system"]}
        found, message = set[str](), ""
        try:
            text = _rendered(endpoint.convert({**asked, "messages": messages[:end]}), template)
        except Exception as error:  # to the client, a request that is refused
            text, found = before, {f"raises {type(error).__name__}"}
            message = f"request {number}: {error}"[:_MOST_SHOWN]
        if not found and (lost := _lost([conversation["system"], *_texts(messages[:end])], text)):
            found = {"out of place" if lost in text else "text lost"}
            message = f"request {number}: {lost!r}"
        if not text.startswith(before):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
            kept = sum(1 for _ in same)
            found.add("prefix changed")
            message = f"request {number} keeps {kept} of the {len(before)} characters before it"
        before = text
        answer["streams"] += 1
        answer["failed"] += bool(found)
        # a changed beginning says more than where a turn went
        if found and ("message" not in answer or "prefix changed" in found - faults):
            answer["message"] = message
        faults |= found
    return {**answer, "faults": sorted(faults), "route": endpoint.conversion}


def _rendered(messages: list[Json], template: str | None) -> str:
    """What the model reads; an engine's own code renders turn after turn."""
    for each in messages:
        if isinstance(parts := each.get("content"), list):
            each["content"] = "\n".join(part.get("text", "") for part in parts)
    if template is None:
        return "".join(f"{json.dumps(each, sort_keys=True)}\n" for each in messages)
    # the image's own Jinja, which the endpoint has imported by now
    sandbox: Any = importlib.import_module("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def refuse(reason: str) -> None:
        raise ValueError(reason)

    return str(environment.from_string(template).render(messages=messages, raise_exception=refuse))


def _texts(messages: list[Json]) -> list[str]:
    """What was said, in order: texts, and results of tools."""
    texts: list[str] = []
    for message in messages:
        blocks = message["content"]
        for block in [{"text": blocks}] if isinstance(blocks, str) else blocks:
            content = block.get("text") or block.get("thinking") or block.get("content") or []
            # a result of a tool is a text, or a list of blocks
            texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    return texts


def _lost(texts: list[str], rendered: str) -> str:
    """The first text that does not follow those before it."""
    at = 0
    for text in texts:
        found = rendered.find(text, at)
        if found < 0:
            return text
        at = found + len(text)
    return ""
