"""The gate sees: a sound parser of every format passes, and every planted defect is caught."""

from __future__ import annotations

import pytest

from pipeline.core.yaml_file import read_yaml
from pipeline.images.gate.files import parser_files
from pipeline.images.gate.parsers.cases import (
    FormatsFile,
    TruthsFile,
    read_parser_gates,
    whole_format,
)
from pipeline.images.gate.parsers.worker.judging import judge_cut_off, judge_whole
from pipeline.images.gate.parsers.worker.tokens import ByteTokenizer
from pipeline.images.spec.checkout import Checkout
from tests.unit.gate.parsers.endpoint import ReferenceEndpoint, shipped_cases
from tests.unit.gate.parsers.reference import (
    CHANNEL_DEFECTS,
    DEFECTS,
    ELEMENT_DEFECTS,
    Reference,
)
from tests.unit.support import ROOT

CHECKOUT = Checkout(ROOT)
CASES = shipped_cases(CHECKOUT, ["sglang-k2", "sglang", "vllm"])
GATES = read_parser_gates(CHECKOUT, "sglang-k2")
FILES = {path.name: path for path in parser_files(CHECKOUT, "vllm").values()}
FORMATS = read_yaml(FILES["formats.yaml"], FormatsFile).root
TOOLS = dict(read_yaml(FILES["truths.yaml"], TruthsFile).tools)
# Those whose answers are short, or look like a format's own text.
TELLING = ("plain", "think", "three-kinds", "empty-twice", "unicode", "edge-space", "less-than")


def endpoint(name: str, defect: str = "", thinks: bool = True, end: str = "") -> ReferenceEndpoint:
    form = whole_format(name, FORMATS).model_dump()
    return ReferenceEndpoint(form, TOOLS, defect, thinks, end)


def planted() -> list[tuple[str, str, str]]:
    """Format, defect and the truth that shows it; only truths that the format has."""
    found = []
    for name, cases in CASES.items():
        form = whole_format(name, FORMATS)
        opening = Reference(form.model_dump(), TOOLS).opening
        cannot = {
            # arguments that stand alone are never on several lines
            "arguments on one line": form.argument is not None,
            # spaces around texts do not count; a message that has an end keeps nothing
            "keeps what it held back": not opening.startswith("<") or form.ends is not None,
            # one token of the model is never cut
            "sends a marker in pieces": opening in form.markers or form.ends is not None,
        }
        elements = ELEMENT_DEFECTS if form.argument else {}
        channels = CHANNEL_DEFECTS if form.ends else {}
        for defect, truth in {**DEFECTS, **elements, **channels}.items():
            if truth in cases and not cannot.get(defect):
                found.append((name, defect, truth))
    return found


def failures(name: str, truth: str, defect: str = "") -> int:
    case = CASES[name][truth].model_dump()
    judge = judge_cut_off if case["cut_off"] else judge_whole
    thinks = all(case["template_kwargs"].values())
    answering = endpoint(name, defect, thinks, case["end"])
    answer = judge(case, ByteTokenizer(case["markers"], case["end"]), answering)
    return int(answer["failed"])


@pytest.mark.share(30)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("truth", TELLING)
def test_a_sound_parser_passes(name: str, truth: str) -> None:
    assert failures(name, truth) == 0


@pytest.mark.big
@pytest.mark.parametrize("name", CASES)
def test_a_sound_parser_passes_every_case(name: str) -> None:
    assert {truth: n for truth in CASES[name] if (n := failures(name, truth))} == {}


@pytest.mark.share(60)
@pytest.mark.parametrize(("name", "defect", "truth"), planted())
def test_a_planted_defect_is_caught(name: str, defect: str, truth: str) -> None:
    assert failures(name, truth, defect)


@pytest.mark.parametrize("name", [name for name in CASES if "plain/thinking-off" in CASES[name]])
def test_an_answer_without_a_thought_is_none(name: str) -> None:
    assert failures(name, "plain/thinking-off") == 0
    assert failures(name, "plain/thinking-off", "takes an answer for a thought")
    assert failures(name, "call/thinking-off", "takes an answer for a thought")


def test_every_format_that_an_image_judges_has_planted_defects() -> None:
    counts = {name: sum(each == name for each, _, _ in planted()) for name in CASES}
    assert min(counts.values()) >= 15
