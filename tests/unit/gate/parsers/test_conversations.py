"""What `/v1/messages` makes of a conversation: sound ones pass, planted ones are caught."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import GateInvalid
from pipeline.images.gate.parsers.cases import MESSAGES, read_parser_gates
from pipeline.images.gate.parsers.judge import ParserAnswer, ParserResult
from pipeline.images.gate.parsers.worker.conversations import judge_conversation
from pipeline.images.spec.checkout import Checkout
from tests.unit.gate.parsers.test_parser_cases import PARSERS, TRUTHS, checkout
from tests.unit.support import ROOT

GATES = read_parser_gates(Checkout(ROOT), "vllm")
CASES = {
    case.name.removeprefix(f"{MESSAGES}/"): case for case in GATES.cases if case.family == MESSAGES
}
Json = dict[str, Any]


class Conversion:
    """Rewrites requests as chat messages, soundly or with a defect."""

    conversion = "here"

    def __init__(self, defect: str = "") -> None:
        self.defect = defect

    def convert(self, asked: Json) -> list[Json]:
        messages = [{"role": "system", "content": asked["system"]}]
        for message in copy.deepcopy(asked["messages"]):
            role, blocks = message["role"], message["content"]
            blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
            if role == "system":
                self.add_system(blocks[0]["text"], messages)
                continue
            made: Json = {"role": role, "content": ""}
            for block in blocks:
                made["content"] += block.get("text", "")
                made["reasoning"] = made.get("reasoning", "") + block.get("thinking", "")
                if block["type"] == "tool_use" and self.defect != "drops calls":
                    made.setdefault("tool_calls", []).append(block)
                if block["type"] == "tool_result":
                    result = block["content"]
                    result = result if isinstance(result, str) else result[0]["text"]
                    made = {"role": "tool", "content": result}
            if self.defect == "drops reasoning":
                made.pop("reasoning", None)
            messages.append(made)
        if self.defect == "counts requests":
            messages[0]["content"] += f" {len(messages)}"
        return messages

    def add_system(self, text: str, messages: list[Json]) -> None:
        if self.defect == "drops system turns":
            return
        if self.defect == "raises":
            raise ValueError("Input should be 'user' or 'assistant'")
        if self.defect == "in place":
            messages.append({"role": "system", "content": text})
        elif self.defect == "as a question":
            messages.append({"role": "user", "content": text})
        elif self.defect == "joins the question":
            next(m for m in messages[::-1] if m["role"] in ("user", "system"))["content"] += text
        else:
            messages[0 if self.defect == "to the front" else -1]["content"] += f"\n\n{text}"


def judged(name: str, defect: str = "") -> ParserResult:
    case = CASES[name]
    told = judge_conversation(case.model_dump(), None, Conversion(defect))
    answer = ParserAnswer.model_validate({"case": case.name, "ended": "judged", **told})
    return ParserResult.of(case, answer, GATES.file, cached=False)


@pytest.mark.parametrize("name", CASES)
def test_a_conversion_that_keeps_everything_in_place_passes(name: str) -> None:
    result = judged(name)
    assert (result.verdict, result.message, result.streams) == ("passed", "", 3)


@pytest.mark.parametrize("name", ["tool-chain/anywhere", "tool-chain/none", "questions/none"])
def test_a_late_system_turn_may_stay_where_it_is(name: str) -> None:
    assert judged(name, "in place").verdict == "passed"


@pytest.mark.parametrize(
    ("name", "defect", "faults"),
    [
        *((name, "to the front", ["out of place", "prefix changed"]) for name in CASES),
        *((name, "drops system turns", ["text lost"]) for name in CASES),
        *((name, "raises", ["raises ValueError"]) for name in CASES),
        *((name, "counts requests", ["prefix changed"]) for name in CASES),
        ("tool-chain/first", "in place", ["raises ValueError"]),
        ("questions/alternating", "in place", ["raises ValueError"]),
        ("questions/alternating", "as a question", ["raises ValueError"]),
        # reasoning from before the last question is left out
        ("tool-chain/first", "as a question", ["text lost"]),
        ("tool-chain/none", "joins the question", ["out of place", "prefix changed"]),
        ("tool-chain/anywhere", "drops reasoning", ["text lost"]),
    ],
)
def test_a_planted_conversion_is_caught(name: str, defect: str, faults: list[str]) -> None:
    result = judged(name, defect)
    assert (result.verdict, result.faults) == ("failed", faults)
    assert result.severity is None


def test_the_message_says_how_much_of_the_beginning_is_left() -> None:
    said = judged("tool-chain/none", "to the front").message
    assert said.startswith("out of place, prefix changed: request 2 keeps ")
    assert said.endswith(" characters before it")


def test_an_image_names_the_conversations_that_judge_it(tmp_path: Path) -> None:
    conversation = {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hi."}, {"role": "system", "content": "Now."}],
        "templates": {"none": None, "plain": "{{ messages }}"},
    }
    files = {
        "parsers": {**PARSERS, "conversations": ["short"]},
        "truths": {**TRUTHS, "conversations": {"short": conversation}},
    }
    names = [case.name for case in read_parser_gates(checkout(tmp_path, **files), "engine").cases]
    assert names[-2:] == ["messages/short/none", "messages/short/plain"]


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ({}, "no such conversation"),
        ({"short": {"system": "", "messages": [], "templates": {"none": None}}}, "messages"),
        ({"short": {"system": "", "messages": [{}, {}], "templates": {}}}, "templates"),
    ],
)
def test_a_conversation_that_is_wrong_is_named(
    tmp_path: Path, conversation: Json, message: str
) -> None:
    files = {
        "parsers": {**PARSERS, "conversations": ["short"]},
        "truths": {**TRUTHS, "conversations": conversation},
    }
    with pytest.raises(GateInvalid, match=message):
        read_parser_gates(checkout(tmp_path, **files), "engine")
