"""The reference for chat templates: Jinja2 with the rules that transformers has for them.

A template is a program that came with the weights, so it runs in Jinja's sandbox, sees plain JSON
alone, and writes so much within so much time and no more.
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from pipeline.core.errors import MissingTool, TemplateUnusable
from pipeline.core.foreign_json import JsonInvalid, read_json

INSTALL = "Install it: pip install 'sm120-pipeline[quality]'."
# Older versions let templates out of the sandbox: github.com/pallets/jinja/releases/tag/3.1.6
_OLDEST_JINJA = (3, 1, 6)
_MOST_SOURCE, _MOST_TEXT = 1 << 20, 32 << 20  # characters
_MOST_S = 20.0
# The first is what templates read; servers and older clients have the others.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateRefused(Exception):
    """The template itself does not take a conversation, in its own words."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with what its tokenizer gives it, such as `bos_token`."""

    source: str
    tokens: Mapping[str, Any] = field(default_factory=dict)
    now: Callable[[], datetime] = datetime.now

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; `options` are what servers take as chat_template_kwargs."""
        import jinja2

        given = {
            "messages": self.messages(messages),
            "tools": _plain(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        parts, length, deadline = [], 0, time.monotonic() + _MOST_S
        try:
            for part in self._compiled.generate(**self.tokens, **(options or {}), **given):
                parts.append(part)
                length += len(part)
                if length > _MOST_TEXT or time.monotonic() > deadline:
                    raise TemplateUnusable("the chat template does not come to an end")
        except jinja2.exceptions.SecurityError as error:
            raise TemplateUnusable(f"the chat template leaves its sandbox: {error}") from error
        except jinja2.exceptions.TemplateError as error:
            raise TemplateRefused(str(error)[:300]) from error
        # a template is code: adding a text to nothing is one of its own mistakes
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateRefused(f"{type(error).__name__}: {error}"[:300]) from error
        except RecursionError as error:
            raise TemplateUnusable("the chat template calls itself without an end") from error
        return "".join(parts)

    @staticmethod
    def messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages of a request as templates get them.

        The arguments of a call travel as text and are an object in templates: vLLM and SGLang read
        them before rendering. Reasoning has several names. A picture is a part without its bytes.
        """
        result = []
        for message in _plain(messages):
            if isinstance(parts := message.get("content"), list):
                is_picture = [part.get("type") == "image_url" for part in parts]
                pairs = zip(is_picture, parts, strict=True)
                message["content"] = [{"type": "image"} if yes else part for yes, part in pairs]
            for call in message.get("tool_calls") or []:
                function = call.get("function", call)
                if isinstance(function.get("arguments"), str):
                    try:
                        data = function["arguments"].encode()
                        function["arguments"] = read_json(data, most_bytes=_MOST_TEXT)
                    except JsonInvalid as error:
                        raise TemplateRefused(f"the arguments of a call: {error}") from error
            thought = next((message[k] for k in _REASONING if message.get(k) is not None), None)
            if thought is not None:
                message = {"thinking": thought, **message, "reasoning_content": thought}
            result.append(message)
        return result

    @cached_property
    def _compiled(self) -> Any:
        """As transformers compiles it: utils/chat_template_utils.py."""
        try:
            import jinja2
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingTool(
                "Jinja2, which renders chat templates, is missing", INSTALL
            ) from error
        version = tuple(int(n) for n in jinja2.__version__.split(".")[:3] if n.isdigit())
        if version < _OLDEST_JINJA:
            raise MissingTool(f"Jinja2 {jinja2.__version__} has a leaking sandbox", INSTALL)
        if len(self.source) > _MOST_SOURCE:
            raise TemplateUnusable(f"the chat template has more than {_MOST_SOURCE} characters")

        class Generation(Extension):
            """`{% generation %}` marks what a model writes, for training: here it is its body."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                # a block of its own, so that what it sets stays in it
                return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(
                    line
                )

            def body(self, caller: Callable[[], str]) -> str:
                return caller()

        def refuse(message: str) -> None:
            raise jinja2.exceptions.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        # Jinja's own escapes HTML, which no model wants to read
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, **{"ensure_ascii": False, **options}
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: self.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise TemplateUnusable(f"the chat template, line {error.lineno}: {error}") from error


def _plain(value: Any) -> Any:
    """A copy of JSON and nothing else: no template gets hold of an object of ours."""
    return json.loads(json.dumps(value, ensure_ascii=False))
