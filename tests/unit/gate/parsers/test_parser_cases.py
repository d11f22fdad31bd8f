"""parsers.yaml, formats and truths: what they make, what they refuse, and what is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline.app.serve import warn_of_parsers
from pipeline.core.errors import GateInvalid
from pipeline.images.gate.evidence import Evidence, EvidenceRow, gate_error
from pipeline.images.gate.parsers.cases import (
    AcceptedAnswer,
    FormatSpec,
    ParserCase,
    ParsersFile,
    ToolCallSpec,
    TruthSpec,
    read_parser_gates,
    written,
)
from pipeline.images.gate.parsers.judge import ParserAnswer, ParserResult, parser_doubts
from pipeline.images.gate.parsers.worker.answers import ClientAnswer, differences
from pipeline.images.gate.patches import decide
from pipeline.images.spec.checkout import Checkout

MARKERS = {"<t>": {"special": False}}
FORMAT: dict[str, Any] = {
    "source": "https://example.com/format",
    "markers": MARKERS,
    "call": "<t>$name $arguments</t>",
}
TRUTHS: dict[str, Any] = {
    "tools": {"now": {}},
    "truths": {"plain": {"content": "Hi."}, "call": {"calls": [{"name": "now", "arguments": {}}]}},
}
FAMILY = {"format": "tags", "stands_for": ["a model"], "parsers": {"tool_call_parser": "tags"}}
PARSERS: dict[str, Any] = {"wheels": [], "families": {"one": FAMILY}}
WHY = "upstream is about to mend it, and nobody speculates here"
LINK = "https://example.com/issues/1"


def checkout(root: Path, **changed: Any) -> Checkout:
    shared, own = root / "images/common/gates/parsers", root / "images/engine/gates"
    for folder in (shared, own):
        folder.mkdir(parents=True)
    files = {"formats": {"tags": FORMAT}, "truths": TRUTHS, "parsers": PARSERS, **changed}
    for name, value in files.items():
        folder = own if name == "parsers" else shared
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump(value, sort_keys=False), encoding="utf-8"
        )
    return Checkout(root)


def test_a_case_is_a_truth_in_the_format_of_a_family(tmp_path: Path) -> None:
    gates = read_parser_gates(checkout(tmp_path), "engine")
    assert [case.name for case in gates.cases] == ["one/plain", "one/call"]
    assert gates.cases[1].text == "</think><t>now {}</t>"
    assert gates.cases[1].prompt.endswith("<think>")
    assert [case.name for case in gates.chosen("one/c*")] == ["one/call"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"parsers": {**PARSERS, "families": {"one": {**FAMILY, "format": "x"}}}},
            "no such format",
        ),
        ({"parsers": {**PARSERS, "families": {}}}, "0 cases"),
        ({"parsers": {**PARSERS, "speed": 1}}, "speed"),
        ({"formats": {"tags": {**FORMAT, "source": "http://x"}}}, "source"),
        ({"formats": {"tags": {**FORMAT, "markers": {}}}}, "markers is missing"),
        ({"formats": {"tags": {"like": "other"}}}, "no whole format 'other'"),
        ({"truths": {**TRUTHS, "tools": {}}}, "there is no tool 'now'"),
        (
            {
                "parsers": {
                    **PARSERS,
                    "accepted": [
                        {"case": "two/*", "faults": ["names"], "reason": WHY, "upstream": [LINK]}
                    ],
                }
            },
            "no case is 'two/*'",
        ),
        (
            {
                "parsers": {
                    **PARSERS,
                    "accepted": [{"case": "one/*", "faults": ["names"], "reason": WHY}],
                }
            },
            "upstream",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(GateInvalid, match=r".") as caught:
        read_parser_gates(checkout(tmp_path, **changed), "engine")
    assert message in str(caught.value)


def test_an_image_without_the_file_has_no_parsers_to_judge(tmp_path: Path) -> None:
    with pytest.raises(GateInvalid, match=r"holds no parsers\.yaml"):
        read_parser_gates(checkout(tmp_path), "other")


def test_a_pattern_that_fits_no_case_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GateInvalid, match="matches no case"):
        read_parser_gates(checkout(tmp_path), "engine").chosen("two/*")


def test_arguments_are_written_as_the_format_has_them() -> None:
    call = ToolCallSpec(name="run", arguments={"a": "x", "b": [1, {"c": True}]})
    form = FormatSpec.model_validate({**FORMAT, "argument": "<$key s=$is_string>$value</$key>"})
    text = written(form, TruthSpec(calls=[call]))
    assert text == '</think><t>run <a s=true>x</a><b s=false>[1, {"c": true}]</b></t>'
    nested = form.model_copy(update={"nested": ("<$key>$value</$key>", "item")})
    text = written(nested, TruthSpec(calls=[call]))
    assert "<b s=false><item>1</item><item><c>true</c></item></b>" in text


CASE = ParserCase(
    name="one/call",
    family="one",
    stands_for=[],
    parsers={},
    model_type="other",
    markers={},
    prompt="",
    opened=True,
    text="",
    truth={},
    tools=[],
    cut_off=False,
)


FILE = ParsersFile(wheels=[], families={})


def answer(**changed: Any) -> ParserAnswer:
    known = {"case": "one/call", "ended": "judged", "streams": 9, "failed": 2, "faults": ["names"]}
    return ParserAnswer.model_validate({**known, **changed})


def accepted(**changed: Any) -> AcceptedAnswer:
    known = {"case": "one/*", "faults": ["names"], "reason": WHY, "upstream": [LINK]}
    return AcceptedAnswer.model_validate({**known, **changed})


@pytest.mark.parametrize(
    ("given", "known", "verdict"),
    [
        ({"failed": 0, "faults": []}, [], "passed"),
        ({}, [accepted()], "accepted"),
        ({}, [accepted(only="larger steps")], "accepted"),
        ({}, [], "failed"),
        ({}, [accepted(case="one/other")], "failed"),
        ({}, [accepted(faults=["content"])], "failed"),
        ({"faults": ["content", "names"]}, [accepted()], "failed"),
        ({"token_by_token": True}, [accepted(only="larger steps")], "failed"),
        ({"streams": 0, "failed": 0}, [], "unknown"),
        ({"ended": "no parser"}, [accepted()], "unknown"),
        ({"ended": "timed out"}, [accepted()], "unknown"),
        ({"ended": "died"}, [accepted()], "unknown"),
    ],
)
def test_the_verdict_on_an_answer(
    given: dict[str, Any], known: list[AcceptedAnswer], verdict: str
) -> None:
    result = ParserResult.of(
        CASE, answer(**given), FILE.model_copy(update={"accepted": known}), cached=False
    )
    assert result.verdict == verdict
    if verdict == "accepted":
        assert LINK in result.message


def test_the_message_has_the_smallest_step_that_breaks_it() -> None:
    step = {"tokens": 2, "step": ".<t>", "empty_end": False, "faults": ["content"]}
    said = ParserResult.of(CASE, answer(smallest=step), FILE, cached=False).message
    assert said == "names: a step of 2 tokens: '.<t>'"
    whole = ParserResult.of(
        CASE, answer(unstreamed={"faults": ["names"]}), FILE, cached=False
    ).message
    assert whole == "names: also without a stream"


def test_lost_answers_end_a_command_with_their_own_error() -> None:
    row = EvidenceRow(name="one/call", verdict="failed", message="names: token by token")
    evidence = Evidence(
        gate="parsers", arch="sm_120", verdict="failed", inputs={}, made_by={}, rows=[row]
    )
    error = gate_error("engine", evidence)
    assert type(error).__name__ == "ParserWrong"
    # parsers are the same for every card
    assert str(error) == "engine: 1 answer is lost or changed: one/call: names: token by token"


TRUTH = {"reasoning": "r", "content": "c", "calls": [{"name": "f", "arguments": {"a": 1}}]}


def got(*calls: dict[str, Any], finish: str = "tool_calls", **texts: str) -> ClientAnswer:
    client = ClientAnswer()
    said = {"reasoning": "r", "content": "c", **texts, "tool_calls": list(calls)}
    client.add({"delta": said, "finish_reason": finish})
    return client


def call(arguments: str = '{"a": 1}', name: str = "f", **more: Any) -> dict[str, Any]:
    return {"index": 0, "id": "1", "function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a":1.0}', '\n{ "a" : 1 }'])
def test_arguments_are_compared_as_JSON(arguments: str) -> None:
    assert differences(TRUTH, got(call(arguments)), []) == []


@pytest.mark.parametrize(
    ("client", "faults"),
    [
        (got(call('{"a": true}')), ["arguments"]),
        (got(call('{"a": "1"}')), ["arguments"]),
        (got(call('{"a": 1')), ["arguments are not JSON"]),
        (got(call("")), ["arguments are not JSON"]),
        (got(call(name="g")), ["names"]),
        (got(), ["names"]),
        (got(finish="stop"), ["finish reason", "names"]),
        (got(call(), finish="stop"), ["finish reason"]),
        (got(call(), call(index=1)), ["ids", "names"]),
        (got(call(), call()), ["arguments are not JSON", "names", "second name"]),
        (got(call(index=1)), ["arguments are not JSON", "ids", "index skipped", "names"]),
        (got(call(), call(name="")), ["arguments are not JSON"]),
        (got(call(name="")), ["arguments before name", "names"]),
        (got(call(), content="c<t>"), ["content", "marker shown"]),
        (got(call(), reasoning=""), ["reasoning"]),
    ],
)
def test_what_a_client_cannot_use_is_a_fault(client: ClientAnswer, faults: list[str]) -> None:
    assert differences(TRUTH, client, ["<t>"]) == faults


def test_a_result_is_JSON() -> None:
    result = ParserResult.of(CASE, answer(), FILE, cached=False)
    assert json.loads(result.model_dump_json())["faults"] == ["names"]


def judged(**changed: Any) -> ParserResult:
    return ParserResult.of(CASE, answer(**changed), FILE, cached=False)


GOOD = judged(failed=0, faults=[])


@pytest.mark.parametrize(
    ("without", "after", "state"),
    [
        ([judged()], [GOOD], "needed"),
        ([judged()], [judged(failed=1)], "weak"),
        ([judged()], [judged(faults=["content"])], "weak"),
        ([judged()], [judged()], "inert"),
        ([judged()], [judged(ended="no parser")], "unknown"),
        ([judged()], None, "conflict"),
        ([GOOD], [GOOD], "superseded"),
        ([judged(ended="no parser")], [GOOD], "unknown"),
    ],
)
def test_a_patch_of_a_parser_is_judged_with_it_and_without(
    without: list[ParserResult], after: list[ParserResult] | None, state: str
) -> None:
    assert decide(without, after, applied=False, conflict="does not apply")[0] == state


USED = {"tool_call_parser": "tags", "reasoning_parser": "think"}


def evidence(*results: ParserResult) -> Evidence:
    rows = [
        EvidenceRow(
            name=result.name,
            verdict=result.verdict,
            message=result.message,
            facts={"parsers": USED, "severity": result.severity},
        )
        for result in results
    ]
    return Evidence(
        gate="parsers", arch="sm_120", verdict="passed", inputs={}, made_by={}, rows=rows
    )


def test_parsers_that_passed_leave_no_doubt() -> None:
    assert parser_doubts(USED, evidence(GOOD), {}) == ""
    assert parser_doubts({"tool_call_parser": "tags"}, evidence(GOOD), {}) == ""


@pytest.mark.parametrize(
    ("used", "found", "reasons", "words"),
    [
        (USED, None, {}, "(tags and think) were not judged on this image"),
        (USED, evidence(), {}, "were not judged on this image"),
        (
            {"tool_call_parser": "auto"},
            evidence(GOOD),
            {"auto": "It is chosen late"},
            "image: It is",
        ),
        ({**USED, "reasoning_parser": "other"}, evidence(GOOD), {}, "were not judged"),
        (
            USED,
            evidence(GOOD, judged()),
            {},
            "1 of 2 known answers in larger steps, as with drafts",
        ),
        (USED, evidence(judged(token_by_token=True)), {}, "1 of 1 known answers: one/call: names"),
        (USED, evidence(judged(ended="died")), {}, "lose or change 1 of 1"),
    ],
)
def test_parsers_that_failed_or_were_not_judged_are_named(
    used: dict[str, str], found: Evidence | None, reasons: dict[str, str], words: str
) -> None:
    assert words in parser_doubts(used, found, reasons)


@pytest.mark.parametrize(
    ("arguments", "is_warned"),
    [
        (["--tool-call-parser", "tags", "--port", "1"], True),
        (["--reasoning-parser=think"], True),
        (["--port", "1"], False),
        (["--tool-call-parser"], False),
    ],
)
def test_serving_warns_of_parsers_that_nobody_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], is_warned: bool
) -> None:
    context: Any = SimpleNamespace(checkout=checkout(tmp_path), store=None)
    recipe = SimpleNamespace(name="model-engine-1x", image="engine")
    launch = SimpleNamespace(arguments=arguments)
    job: Any = SimpleNamespace(recipe=recipe, launch=launch, record=None)
    warn_of_parsers(context, job)
    said = capsys.readouterr().err
    assert ("Mind: model-engine-1x: its parsers" in said) is is_warned
    assert ("`sm120 gate run engine --only parsers`" in said) is is_warned


@pytest.mark.parametrize(("result", "is_warned"), [(GOOD, False), (judged(), True)])
def test_serving_asks_for_the_results_of_the_very_image(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    result: ParserResult,
    is_warned: bool,
) -> None:
    folder = checkout(tmp_path).folder
    specs = SimpleNamespace(
        folder=folder, spec=lambda _: SimpleNamespace(platforms=["linux/amd64"])
    )
    context: Any = SimpleNamespace(checkout=specs, store="store")
    launch = SimpleNamespace(arguments=["--tool-call-parser", "tags"])
    recipe = SimpleNamespace(name="model-engine-1x", image="engine")
    job: Any = SimpleNamespace(recipe=recipe, launch=launch, record=SimpleNamespace(digest="d"))
    asked = []

    def read(*about: object) -> Any:
        asked.append(about)
        return SimpleNamespace(results=[evidence(result)])

    monkeypatch.setattr("pipeline.app.serve.read_evidence", read)
    warn_of_parsers(context, job)
    assert asked == [("store", "engine", "linux/amd64", "d")]
    assert ("in larger steps" in capsys.readouterr().err) is is_warned
