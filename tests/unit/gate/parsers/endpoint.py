"""An endpoint around a reference parser, in this process: what the worker's own code judges."""

from __future__ import annotations

from typing import Any

from pipeline.images.gate.parsers.cases import ParserCase, read_parser_gates
from pipeline.images.gate.parsers.worker.answers import ClientAnswer
from pipeline.images.gate.parsers.worker.tokens import ByteToken
from pipeline.images.spec.checkout import Checkout
from tests.unit.gate.parsers.reference import Reference


class ReferenceEndpoint:
    """Sends the deltas that a sound engine sends, or one with a defect."""

    def __init__(
        self,
        form: dict[str, Any],
        tools: dict[str, Any],
        defect: str = "",
        thinks: bool = True,
        end: str = "",
    ) -> None:
        self.form, self.tools, self.defect, self.thinks = form, tools, defect, thinks
        self.end = end  # the token that stops the answer, where it has a meaning

    def send(self, steps: list[list[ByteToken]], reason: str) -> ClientAnswer:
        parser = Reference(self.form, self.tools, self.defect, thinks=self.thinks)
        answer = ClientAnswer()
        is_called = False
        for place, step in enumerate(steps):
            final = place + 1 == len(steps)
            stop = self.end if final and reason == "stop" else ""
            out = parser.feed("".join(token.text for token in step) + stop, final=final)
            is_called = is_called or bool(out["calls"])
            calls = [
                {
                    "index": index,
                    "id": "same" if self.defect == "same id" else f"call-{index}",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, name, arguments in out["calls"]
            ]
            said = {"reasoning": out["reasoning"], "content": out["content"], "tool_calls": calls}
            is_tool = is_called and reason == "stop" and self.defect != "finish reason"
            finish = ("tool_calls" if is_tool else reason) if final else None
            answer.add({"delta": said, "finish_reason": finish})
        return answer

    def ask(self, tokens: list[ByteToken]) -> ClientAnswer:
        return self.send([tokens, []], "stop")


def shipped_cases(checkout: Checkout, images: list[str]) -> dict[str, dict[str, ParserCase]]:
    """Every format that images judge → truth → its case."""
    formats: dict[str, dict[str, ParserCase]] = {}
    for image in images:
        gates = read_parser_gates(checkout, image)
        for case in gates.cases:
            if case.conversation is not None:
                continue
            named = formats.setdefault(gates.file.families[case.family].format, {})
            named.setdefault(case.name.partition("/")[2], case)
    return formats
