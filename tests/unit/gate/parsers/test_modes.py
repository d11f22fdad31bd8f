"""Other ways to ask for the same truths: what their cases hold, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import GateInvalid
from pipeline.images.gate.files import gate_files, parser_owner
from pipeline.images.gate.parsers.cases import ParserCase, read_parser_gates
from pipeline.images.spec.checkout import Checkout
from tests.unit.gate.parsers.test_parser_cases import FAMILY, FORMAT, LINK, PARSERS, checkout
from tests.unit.support import ROOT

SWITCH = {"kwarg": "thinking", "prompt": "<think></think>", "source": LINK}
CALL = {"name": "now", "arguments": {}}
TRUTHS: dict[str, Any] = {
    "tools": {"now": {}},
    "truths": {
        "plain": {"reasoning": "R.", "content": "Hi."},
        "call": {"reasoning": "R.", "content": "Hi.", "calls": [CALL]},
        "twice": {"calls": [CALL, CALL]},
    },
}


def made(
    root: Path,
    form: dict[str, Any] | None = None,
    parsers: dict[str, Any] | None = None,
    **modes: Any,
) -> dict[str, ParserCase]:
    files = {
        "formats": {"tags": {**FORMAT, **(form or {})}},
        "parsers": {**PARSERS, **(parsers or {})},
        "truths": {**TRUTHS, "modes": modes},
    }
    # YAML would write what stands in two places as a reference
    gates = read_parser_gates(checkout(root, **json.loads(json.dumps(files))), "engine")
    return {case.name.removeprefix("one/"): case for case in gates.cases}


def test_a_required_call_is_written_in_every_form_that_a_grammar_can_ask_for(
    tmp_path: Path,
) -> None:
    grammar = {"before": "\n", "no_arguments": "~", "source": LINK}
    form = {"argument": "<$key>$value", "grammar": grammar}
    case = made(tmp_path, form, required={"truths": ["call"]})["call/required"]
    assert case.tool_choice == "required"
    assert case.truth["content"] == ""
    assert case.text == "R.</think><t>now </t>"
    assert case.forms["native"] == "R.</think>\n<t>now ~</t>"
    assert case.forms["calls"] == 'R.</think>[{"name": "now", "parameters": {}}]'
    assert case.forms["arguments"] == "R.</think>{}"
    assert not case.every_cut


MESSAGES: dict[str, Any] = {
    "opened_by": "model",
    "thinking": ["<t>a:", "<e>"],
    "empty_thought": False,
    "content": "<t>f:$content",
    "preamble": "<t>c:$content<e>",
    "call": "<t>$name:$arguments",
    "between": "<e>",
    "ends": ["<r>", "<c>"],
}


@pytest.mark.parametrize(
    ("truth", "text", "end"),
    [
        ("plain", "<t>a:R.<e><t>f:Hi.", "<r>"),
        ("call", "<t>a:R.<e><t>c:Hi.<e><t>now:{}", "<c>"),
        ("twice", "<t>now:{}<e><t>now:{}", "<c>"),
    ],
)
def test_texts_may_stand_in_messages_of_their_own(
    tmp_path: Path, truth: str, text: str, end: str
) -> None:
    case = made(tmp_path, MESSAGES)[truth]
    assert (case.text, case.end) == (text, end)


def test_a_grammar_may_end_an_answer_after_one_call(tmp_path: Path) -> None:
    one = {**MESSAGES, "grammar": {"one_call": True, "source": LINK}}
    modes: Any = {"required": {"truths": ["call", "twice"]}, "messages": {"truths": ["twice"]}}
    several = made(tmp_path / "a", MESSAGES, **modes)
    assert "twice/required" in several
    names = made(tmp_path / "b", one, **modes)
    assert "twice/required" not in names
    assert {"call/required", "twice/messages", "twice"} <= set(names)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"ends": ["<r>"]}, "ends"),
        ({"vocabulary": "tiktoken"}, "vocabulary"),
        ({"empty_thought": "never"}, "empty_thought"),
        ({"grammar": {"one_call": "some"}}, "one_call"),
    ],
)
def test_what_a_format_cannot_say_is_refused(
    tmp_path: Path, form: dict[str, Any], message: str
) -> None:
    with pytest.raises(GateInvalid, match=message):
        made(tmp_path, form)


def test_a_named_tool_may_end_in_either_word(tmp_path: Path) -> None:
    case = made(tmp_path, named={"truths": ["call"], "every_cut": ["call"]})["call/named"]
    assert (case.tool_choice, case.every_cut) == ("named", True)
    assert case.truth["finish"] == ["tool_calls", "stop"]


def test_with_thinking_off_the_template_has_closed_the_thought(tmp_path: Path) -> None:
    mode = {"truths": ["plain"]}
    case = made(tmp_path, {"switch": SWITCH}, **{"thinking-off": mode})["plain/thinking-off"]
    assert (case.text, case.truth["reasoning"], case.opened) == ("Hi.", "", False)
    assert case.prompt.endswith("<think></think>")
    assert case.template_kwargs == {"thinking": False}


def test_models_that_always_think_have_no_case_without_a_thought(tmp_path: Path) -> None:
    mode: Any = {"thinking-off": {"truths": ["plain"]}}
    always = {"always_thinks": "The template opens a thought whatever is asked."}
    family: dict[str, Any] = {"families": {"one": {**FAMILY, **always}}}
    assert "plain/thinking-off" not in made(tmp_path / "a", **mode)
    assert "plain/thinking-off" not in made(tmp_path / "b", {"switch": SWITCH}, family, **mode)


def test_other_endpoints_have_the_same_answer(tmp_path: Path) -> None:
    cases = made(tmp_path, messages={"truths": ["call"]}, responses={"truths": ["call"]})
    for kind in ("messages", "responses"):
        assert cases[f"call/{kind}"].endpoint == kind
        assert cases[f"call/{kind}"].text == cases["call"].text


def test_an_endpoint_that_is_not_there_has_one_case(tmp_path: Path) -> None:
    absent = {"no_endpoint": {"messages": "This version of it has no such endpoint."}}
    modes: Any = {"messages": {"truths": ["plain", "call"]}, "required": {"truths": ["call"]}}
    names = made(tmp_path, None, absent, **modes)
    assert [name for name in names if name.endswith("messages")] == ["plain/messages"]
    assert "call/required" in names


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"required": {"truths": ["other"]}}, "there is no truth 'other'"),
        ({"required": {"truths": ["call"], "every_cut": ["other"]}}, "there is no truth 'other'"),
        ({"required": {"truths": ["plain"]}}, "required needs a call"),
        ({"named": {"truths": ["twice"]}}, "named needs a call"),
        ({"sideways": {"truths": ["plain"]}}, "sideways"),
        ({"messages": {"truths": []}}, "truths"),
    ],
)
def test_a_mode_that_cannot_be_asked_for_is_refused(
    tmp_path: Path, modes: dict[str, Any], message: str
) -> None:
    with pytest.raises(GateInvalid, match=r".") as caught:
        made(tmp_path, **modes)
    assert message in str(caught.value)


def test_markers_are_compared_with_a_tokenizer(tmp_path: Path) -> None:
    formats = {"tags": FORMAT, "other": {**FORMAT, "markers": {"<u>": {"special": True}}}}
    families = {"one": FAMILY, "two": {**FAMILY, "format": "other"}}
    files = {"formats": formats, "parsers": {**PARSERS, "families": families}}
    specs = checkout(tmp_path, **json.loads(json.dumps(files)))
    gates = read_parser_gates(specs, "engine")
    gates.check_markers("one", {"<t>": False, "<x>": True}, "w")
    gates.check_markers("two", {"<u>": True}, "w")
    for family, added, words in (
        ("one", {"<t>": True}, "one: its tokenizer has '<t>' as special, formats.yaml as not"),
        ("two", {"<u>": False}, "two: its tokenizer has '<u>' as not special, formats.yaml as spe"),
        ("one", {"<v>": False}, "has '<t>' as no token of its own"),
        ("three", {"<t>": False}, "no such family of models"),
    ):
        with pytest.raises(GateInvalid, match=r".") as caught:
            gates.check_markers(family, added, "w")
        assert words in str(caught.value)


def test_a_marker_that_is_no_token_is_named() -> None:
    gates = read_parser_gates(Checkout(ROOT), "sglang-k2")
    markers = gates.cases[0].markers
    gates.check_markers("kimi-k2", markers, "w")
    fewer = {text: special for text, special in markers.items() if text != "<|tool_call_end|>"}
    with pytest.raises(GateInvalid, match=r"'<\|tool_call_end\|>' as no token of its own"):
        gates.check_markers("kimi-k2", fewer, "w")


def test_an_image_on_top_of_an_engine_has_the_cases_of_its_base() -> None:
    specs = Checkout(ROOT)
    assert parser_owner(specs, "vllm-nccl") == "vllm"
    own, base = (read_parser_gates(specs, name).cases for name in ("vllm-nccl", "vllm"))
    assert own == base
    assert "vllm/gates/parsers.yaml" in gate_files(specs, "vllm-nccl", "parsers")
    assert "gates/parsers.yaml" in gate_files(specs, "vllm", "parsers")


@pytest.mark.parametrize("image", ["llama-cpp", "debian-python"])
def test_an_image_without_such_an_engine_has_none(image: str) -> None:
    with pytest.raises(GateInvalid, match=r"holds no parsers\.yaml"):
        read_parser_gates(Checkout(ROOT), image)


def test_every_engine_image_is_judged_in_every_way_or_says_why_not() -> None:
    for image in ("sglang-k2", "sglang", "vllm", "vllm-b12x", "vllm-nccl"):
        gates = read_parser_gates(Checkout(ROOT), image)
        ways = {(case.endpoint, case.tool_choice) for case in gates.cases}
        assert {("chat", "auto"), ("chat", "required"), ("chat", "named")} < ways
        assert {("messages", "auto"), ("responses", "auto")} < ways
        assert any(not all(case.template_kwargs.values()) for case in gates.cases)


def test_JSON_that_a_grammar_asks_for_means_what_the_truth_means() -> None:
    for case in read_parser_gates(Checkout(ROOT), "vllm").cases:
        if case.tool_choice == "auto":
            continue
        calls = json.loads(case.forms["calls"].removeprefix(case.thought))
        meant = [(call["name"], call["arguments"]) for call in case.truth["calls"]]
        assert [(call["name"], call["parameters"]) for call in calls] == meant
