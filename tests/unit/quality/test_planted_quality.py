"""Each part sees what is planted for it, and passes servers that are sound."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path

import pytest

from pipeline.core.errors import InputInvalid, ScoresInvalid
from pipeline.core.net.wire import Address
from pipeline.images.gate.templates.cases import conversations
from pipeline.images.gate.templates.files import ModelText
from pipeline.images.gate.templates.renderer import ChatTemplate
from pipeline.serving.quality import estimate
from pipeline.serving.quality.agreement import (
    AgreementReference,
    first_token,
    judge_agreement,
    read_reference,
    record_agreement,
    write_reference,
)
from pipeline.serving.quality.model import QualityPart, QualityPlan
from pipeline.serving.quality.probes import probes
from pipeline.serving.quality.session import QualitySession
from pipeline.serving.quality.token_counts import judge_tokens
from pipeline.serving.quality.tool_calls import judge_schema
from pipeline.serving.quality.tool_cases import ToolCase, read_tool_cases, tool_cases
from pipeline.serving.smoke.client import ChatClient, NotOffered, Unsound
from pipeline.serving.smoke.schema import schema_fault
from tests.testbed.model_server import listening
from tests.testbed.quality_faults import FAULTS, SOUND
from tests.testbed.quality_server import TEMPLATE, QualityFault, QualityServer

PLAN = QualityPlan(at_once=16)
ONE = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
TEXT = ModelText(ONE, ONE, {}, None, "tokenizer.json is missing")


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_DRAWS", 200)


@cache
def planned_cases() -> list[ToolCase]:
    """The same for every server."""
    return tool_cases(PLAN.cases, PLAN.seed)


async def _with(server: QualityServer, part: str) -> QualityPart | AgreementReference:
    async with listening(server) as url:  # type: ignore[arg-type] # it has the same `handle`
        session = QualitySession(ChatClient(Address.read(url), PLAN.limits), PLAN)
        await session.find_model()
        if part == "tokens":
            return await judge_tokens(session, TEXT, conversations())
        if part == "schema":
            return await judge_schema(session, planned_cases())
        if part == "record":
            chosen = probes(TEXT, PLAN.texts, PLAN.places, PLAN.seed)
            return await record_agreement(session, url, chosen)
        return await judge_agreement(session, trusted(), "sha256:" + "0" * 64)


def judged(fault: QualityFault, part: str) -> QualityPart:
    made = asyncio.run(_with(QualityServer(fault), part))
    assert isinstance(made, QualityPart)
    return made


@cache
def trusted() -> AgreementReference:
    """What a sound server expects."""
    made = _record()
    assert isinstance(made, AgreementReference)
    return made


def _record() -> object:
    # in a thread of its own: the first caller may be inside an event loop
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(_with(QualityServer(), "record"))).result()


@pytest.mark.share(8)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_seen_by_its_part(fault: QualityFault) -> None:
    part = judged(fault, fault.part)
    # without log probabilities nothing can be judged, which is no success
    wanted = "unknown" if not fault.has_logprobs else "failed"
    assert part.verdict == wanted, part.message


@pytest.mark.share(4)
@pytest.mark.parametrize("manner", SOUND, ids=lambda fault: f"{fault.part}: {fault.name}")
def test_a_sound_server_passes(manner: QualityFault) -> None:
    found = judged(manner, manner.part)
    assert found.verdict == "passed", (found.message, found.rows[:3])


def test_a_count_that_is_off_by_a_constant_says_by_how_much() -> None:
    fault = QualityFault(count=lambda n, _: n + 3)
    assert "all off by +3" in judged(fault, "tokens").message


def test_every_kind_of_conversation_is_counted() -> None:
    part = judged(QualityFault(), "tokens")
    passed = {row.name for row in part.rows if row.verdict == "passed"}
    assert {c.name for c in conversations()} - passed == {"picture"}


def test_without_a_tokenizer_only_the_template_is_judged() -> None:
    assert "not the tokenizer" in judged(QualityFault(), "tokens").message


def test_a_tokenizer_of_the_weights_counts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ModelText(ONE, ONE, {}, Path("tokenizer.json"))
    # a tokenizer with a token for each character counts otherwise than the server does
    monkeypatch.setattr(ModelText, "count", lambda self, rendered: len(rendered))
    monkeypatch.setitem(globals(), "TEXT", text)
    part = judged(QualityFault(), "tokens")
    assert part.verdict == "failed"
    assert "by tokenizer.json" in part.message


def test_calls_are_judged_whole_and_streamed_apart() -> None:
    fault = QualityFault(call=lambda c, n, is_stream: None if is_stream else c)
    part = judged(fault, "schema")
    whole, streamed, exact = part.numbers
    assert (whole.estimate.value, streamed.estimate.value) == (1.0, 0.0)
    assert (whole.estimate.n, exact.name) == (300, "arguments as asked for")


def test_arguments_that_fit_and_are_others_are_counted_without_a_verdict() -> None:
    fault = QualityFault(call=lambda c, *_: (c[0], c[1].replace("Oslo", "Bergen")))
    part = judged(fault, "schema")
    assert part.verdict in ("passed", "failed")
    assert part.numbers[-1].bar is None


def test_protocol_places_are_judged_apart() -> None:
    found = {n.name: n for n in judged(QualityFault(), "agreement").numbers}
    assert list(found) == [
        "top-1 agreement, all places",
        "mean |Δlogprob|, all places",
        "top-1 agreement, protocol places",
        "mean |Δlogprob|, protocol places",
    ]
    everything, protocol = list(found.values())[1::2]
    assert 96 < protocol.estimate.n < everything.estimate.n <= 96 * 8


def test_cases_fit_their_own_schemas_and_are_the_same_each_time() -> None:
    cases = tool_cases(300, 26)
    assert cases == tool_cases(300, 26)
    assert cases != tool_cases(300, 27)
    for case in cases:
        assert case.wanted
        name, value = case.wanted
        assert schema_fault(case.parameters(name), value) == ""
    whole = json.dumps([case.tools for case in cases])
    wanted = [json.dumps(case.wanted, ensure_ascii=False) for case in cases]
    for sign in ("anyOf", "enum", '"array"', '"boolean"', "additionalProperties", "-"):
        assert sign in whole
    assert sum("城市" in each for each in wanted) > 5
    assert sum("-" in case.wanted[0] for case in cases if case.wanted) > 50


def test_cases_of_a_folder_are_requests_or_schemas(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    request = {"messages": [{"role": "_input", "content": "x"}], "tools": [tool], "seed": 1}
    lines = [request, {"type": "object", "properties": {"a": {}}}, {"schema": {"type": "string"}}]
    folder = tmp_path / "TestAny"
    folder.mkdir()
    text = "\n".join(json.dumps(line) for line in [*lines, {"request": {}, "response": {}}])
    (folder / "valid.jsonl").write_text(text + "\n\n")
    (folder / "invalid.jsonl").write_text("no JSON\n")
    found = read_tool_cases(tmp_path)
    assert [case.name for case in found] == [f"TestAny/valid.jsonl:{n}" for n in (1, 2, 3)]
    assert found[0].messages[0]["role"] == "system"
    assert found[2].parameters("fill_in")["required"] == ["value"]
    assert [case.choice for case in found] == [None, "required", "required"]


@pytest.mark.parametrize("line", ["{", "[]", '{"a": 1}', "7", "", '{"schema": 7}'])
def test_a_folder_without_cases_or_with_others_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text(line + "\n")
    with pytest.raises(InputInvalid):
        read_tool_cases(tmp_path)


def test_a_reference_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    write_reference(tmp_path / "r.json", trusted())
    found, digest = read_reference(tmp_path / "r.json")
    assert found == trusted()
    assert digest.startswith("sha256:")


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", '{"format": 2}', '{"format": 1, "model": "m", "url": "u", "texts": [{}]}',
     '{"model": "m", "url": "u", "texts": [{"text": "x", "places": [{"at": 0,'
     ' "is_protocol": true, "top": [["a", 7.0]]}]}]}'],
)  # fmt: skip
def test_a_file_that_is_no_reference_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ScoresInvalid):
        read_reference(tmp_path / "r.json")


@pytest.mark.parametrize(
    "given",
    [None, {}, [], {"content": []}, {"content": [{"token": "a", "logprob": -1}]},
     {"tokens": ["a"], "token_logprobs": [], "top_logprobs": [{}]},
     {"tokens": ["a"], "token_logprobs": [3.0], "top_logprobs": [{"a": 3.0}]},
     {"tokens": ["a"], "token_logprobs": [-5.0], "top_logprobs": [{"b": -0.1}]}],
)  # fmt: skip
def test_an_answer_without_log_probabilities_is_refused(given: object) -> None:
    with pytest.raises((Unsound, NotOffered)):
        first_token({"choices": [{"logprobs": given}]})
