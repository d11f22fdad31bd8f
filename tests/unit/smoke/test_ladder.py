"""How a run of the ladder ends, what it keeps, and what is stated about it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import InputInvalid
from pipeline.core.model import sha256_of
from pipeline.core.net.wire import Address, KeptConnection
from pipeline.images.gate.runs import EXCHANGES, RESULT, ImageRun
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import context_of
from pipeline.serving.recipe.model import RecipeFile
from pipeline.serving.smoke.client import ChatClient, Unsound
from pipeline.serving.smoke.ladder import LADDER, as_run, keep_ladder, run_ladder
from pipeline.serving.smoke.model import SmokePlan, SmokeResult, plan_for, quick
from pipeline.serving.smoke.rungs import streams
from pipeline.serving.smoke.session import Baseline, SmokeSession, read_baseline, write_baseline
from tests.testbed.model_faults import FAULTS
from tests.testbed.model_server import Asked, Fault, ModelServer, listening
from tests.unit.smoke.ladder_runs import PLAN, ladder_result, open_session, recorded
from tests.unit.support import ROOT

SHORT = LADDER[:2]


def _short_run(server: ModelServer, plan: SmokePlan = PLAN) -> tuple[SmokeResult, SmokeSession]:
    async def run() -> tuple[SmokeResult, SmokeSession]:
        async with listening(server) as url:
            session = open_session(url, plan)
            return await run_ladder(session, url, SHORT, say=lambda _: None), session

    return asyncio.run(run())


def _run(result: SmokeResult, session: SmokeSession, inputs: dict[str, str]) -> ImageRun:
    exchanges = session.client.exchanges
    return as_run(result, exchanges, recipe="small", inputs=inputs, machine={"engine": "docker"})


def _fault(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def test_the_ladder_stops_at_the_first_rung_that_fails() -> None:
    result, _ = _short_run(ModelServer(_fault("wrong arithmetic")))
    assert [rung.verdict for rung in result.rungs] == ["passed", "failed"]
    assert (result.verdict, result.last_good) == ("failed", "first-answer")


def test_the_other_checks_of_a_failed_rung_are_still_made() -> None:
    result, _ = _short_run(ModelServer(_fault("wrong arithmetic")))
    verdicts = {check.name: check.verdict for check in result.rungs[1].checks}
    assert (verdicts["arithmetic"], verdicts["JSON by schema"]) == ("failed", "passed")


def test_a_failed_check_names_the_exchanges_that_show_it() -> None:
    result, session = _short_run(ModelServer(_fault("wrong code")))
    (failed,) = result.failures()
    shown = [session.client.exchanges[number] for number in failed.evidence]
    assert [e.check for e in shown] == ["answers: code"] * len(shown)
    assert "sum_squares" in shown[0].answer


def test_nobody_at_the_address_fails_the_first_rung_at_once() -> None:
    session = open_session("http://127.0.0.1:9", PLAN)
    result = asyncio.run(run_ladder(session, "http://127.0.0.1:9", say=lambda _: None))
    verdicts = [check.verdict for check in result.rungs[0].checks]
    assert verdicts == ["failed", *["skipped"] * 5]
    assert {check.message for check in result.rungs[0].checks[1:]} == {"the server does not answer"}
    assert (result.last_good, result.exchanges) == (None, 1)
    # the time that passed, not the one that a request may take
    assert session.client.exchanges[0].seconds < 5 < session.plan.limits.request_s


def test_a_server_that_answered_before_it_went_is_said_to_answer_no_longer() -> None:
    def gone(asked: Asked, data: bytes) -> bytes:
        return b"" if asked.path == "/v1/models" else data

    result = ladder_result(ModelServer(Fault("dies", raw=gone)))
    messages = [check.message for check in result.rungs[0].checks if check.verdict == "skipped"]
    assert set(messages) == {"the server no longer answers"}


def test_quality_is_skipped_with_its_reason_where_the_model_cannot_think() -> None:
    plan = PLAN.model_copy(update={"quality": False, "why_no_quality": "the model is tiny"})
    result, _ = _short_run(ModelServer(can_count_only=True), plan)
    checks = [check for check in result.rungs[1].checks if check.kind == "quality"]
    skipped = {(check.verdict, check.message) for check in checks}
    assert (result.verdict, skipped) == ("passed", {("skipped", "the model is tiny")})


def test_a_server_that_never_answers_is_left_after_the_limit() -> None:
    plan = PLAN.model_copy(update={"limits": PLAN.limits.model_copy(update={"request_s": 1.5})})
    hangs = Fault("hangs", delay_s=lambda asked: 5.0 if "chat" in asked.path else 0.0)
    result, _ = _short_run(ModelServer(hangs), plan)
    checks = {check.name: check.message for check in result.rungs[0].checks}
    assert checks["one answer"] == "no whole answer within 1.5 s"
    assert checks["one stream"] == "the server no longer answers"


def test_an_answer_is_read_no_further_than_its_tokens_can_be_long() -> None:
    huge = Fault("huge", body=lambda _, body: {**body, "padding": "x" * (2 << 20)})
    result, session = _short_run(ModelServer(huge))
    checks = {check.name: check.message for check in result.rungs[0].checks}
    assert checks["token limit"] == f"the answer is larger than {(1 << 20) + 4 * 4096} bytes"
    assert max(len(exchange.answer) for exchange in session.client.exchanges) < 21_000


def test_a_model_that_only_recites_fails_where_quality_is_asked_for() -> None:
    result, _ = _short_run(ModelServer(can_count_only=True))
    assert result.verdict == "failed"


def test_a_server_without_the_recipes_model_fails() -> None:
    result, _ = _short_run(ModelServer(), PLAN.model_copy(update={"model": "kimi"}))
    assert "has no 'kimi' (there are: brain-1)" in result.failures()[0].message


def test_a_context_that_the_recipe_has_and_the_server_has_not_is_a_failure() -> None:
    result = ladder_result(ModelServer(), PLAN.model_copy(update={"contexts": [1024, 65536]}))
    assert [c.name for c in result.failures()] == ["context 65536"]
    assert result.last_good == "streams"


def test_a_step_beyond_what_the_recipe_starts_with_waits_for_another_start() -> None:
    changes = {"contexts": [1024, 65536, 98304], "served_tokens": 2048}
    result = ladder_result(ModelServer(), PLAN.model_copy(update=changes))
    skipped = {c.name: c.message for c in result.rungs[4].checks if c.verdict == "skipped"}
    assert result.failures() == []
    assert "serve it with --max-model-len 98304" in skipped["context 98304"]


@pytest.mark.parametrize("served", [65536, 98304])
def test_a_server_with_less_than_the_recipe_starts_with_fails(served: int) -> None:
    changes = {"contexts": [1024, 65536], "served_tokens": served}
    result = ladder_result(ModelServer(), PLAN.model_copy(update=changes))
    assert [c.name for c in result.failures()] == ["context 65536"]


def test_a_context_too_small_for_a_check_skips_it_with_the_reason() -> None:
    result = ladder_result(ModelServer(context=400), PLAN.model_copy(update={"depths": [0.5]}))
    skipped = {c.name: c.message for c in result.rungs[4].checks if c.verdict == "skipped"}
    assert result.failures() == []
    assert "no room for more than one batch of 600" in skipped["longer than one batch"]


def test_a_run_is_kept_as_two_files(tmp_path: Path) -> None:
    result, session = _short_run(ModelServer())
    keep_ladder(tmp_path, result, session.client.exchanges)
    assert SmokeResult.model_validate_json((tmp_path / RESULT).read_bytes()) == result
    lines = (tmp_path / EXCHANGES).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["number"] for line in lines] == [*range(result.exchanges)]


def test_a_statement_tells_what_passed_failed_and_was_skipped() -> None:
    result, session = _short_run(ModelServer(_fault("wrong code"), has_logprobs=False))
    run = _run(result, session, {"weights": f"sha256:{'0' * 64}"})
    assert (run.verdict, run.last_good, run.recipe) == ("failed", "first-answer", "small")
    named: dict[str, list[str]] = {}
    for test in run.tests:
        named.setdefault(test.verdict, []).append(test.name)
    assert named["failed"] == ["answers: code"]
    assert named["skipped"] == ["answers: logprobs"]
    assert "answers: arithmetic" in named["passed"]


def test_a_statement_names_the_bytes_of_both_files_that_are_kept(tmp_path: Path) -> None:
    result, session = _short_run(ModelServer())
    keep_ladder(tmp_path, result, session.client.exchanges)
    inputs = _run(result, session, {}).inputs
    files = {name: sha256_of((tmp_path / name).read_bytes()) for name in (EXCHANGES, RESULT)}
    assert inputs == files


def test_a_run_in_which_everything_was_skipped_is_no_success() -> None:
    result, session = _short_run(ModelServer())
    skipped = [
        rung.model_copy(
            update={"checks": [c.model_copy(update={"verdict": "skipped"}) for c in rung.checks]}
        )
        for rung in result.rungs
    ]
    nothing = result.model_copy(update={"rungs": skipped})
    assert _run(nothing, session, {}).verdict == "unknown"


def test_a_baseline_reads_back_what_was_recorded(tmp_path: Path) -> None:
    baseline = recorded(ModelServer())
    write_baseline(tmp_path / "base.json", baseline)
    assert read_baseline(tmp_path / "base.json") == baseline
    assert all(answer.is_right for answer in baseline.answers)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": "m", "url": "u", "answers": [1]}'])
def test_what_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "base.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputInvalid, match="is no baseline"):
        read_baseline(tmp_path / "base.json")


def test_a_run_with_shorter_answers_is_held_against_a_baseline_with_long_ones() -> None:
    plan = PLAN.model_copy(update={"answer_tokens": 12, "quality": False})
    result = ladder_result(ModelServer(), plan, recorded(ModelServer()))
    assert [check.message for check in result.failures()] == []


def test_a_baseline_of_other_prompts_is_not_taken_for_a_success() -> None:
    empty = Baseline(model="brain-1", url="", answers=[])
    result = ladder_result(ModelServer(), baseline=empty)
    assert result.failures()[0].name == "the baseline's answers"


def _recipe(**changes: object) -> SmokePlan:
    body = {
        "name": "small",
        "summary": "A small one.",
        "backing": "proved",
        "sources": {"ours": {"kind": "ours", "title": "Ours", "why": "To try it."}},
        "model": {"tiny": True, "name": "tiny", "file": "tiny.gguf"},
        "hardware": {"cards": 0},
        "port": 8080,
        "engine": "llama-cpp",
        "smoke": {"tools": False, "streams": [1, 2], "contexts": [512]},
        **changes,
    }
    return plan_for(RecipeFile.model_validate(body).root)


def test_a_tiny_recipe_is_run_in_small_steps_and_without_quality() -> None:
    plan = _recipe()
    assert (plan.quality, plan.tools, plan.model) == (False, False, "tiny")
    assert (plan.streams, plan.contexts, plan.lengths) == ([1, 2], [512], 16)


def test_a_real_recipe_is_run_whole() -> None:
    plan = _recipe(
        model={"repository": "a/b", "name": "b", "file": "b.gguf"}, smoke={"reasoning": True}
    )
    assert (plan.quality, plan.reasoning, plan.lengths) == (True, True, 64)
    assert quick(plan).lengths == 16
    assert quick(plan).answer_tokens == plan.answer_tokens  # thinking needs them


@pytest.mark.parametrize("name", Recipes([ROOT / "recipes"]).names())
def test_every_recipe_of_the_checkout_can_be_run(name: str) -> None:
    recipe = Recipes([ROOT / "recipes"]).read(name)
    plan = plan_for(recipe)
    assert (plan.model, plan.quality) == (recipe.model.name, not recipe.model.tiny)
    assert plan.streams == recipe.smoke.streams
    assert plan.served_tokens == context_of(recipe)


def test_the_walk_of_the_first_document_begins_with_what_its_recipe_serves() -> None:
    plan = plan_for(Recipes([ROOT / "recipes"]).read("kimi-k26-vllm-8x"))
    assert (plan.served_tokens, plan.contexts[0]) == (65536, 65536)


def test_kept_connections_are_closed_also_where_an_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def known(*_: object, **__: object) -> None:
        return None

    async def wrong(*_: object, **__: object) -> None:
        raise Unsound("another prompt's answer")

    closed = list[KeptConnection]()
    monkeypatch.setattr(KeptConnection, "close", lambda kept: closed.append(kept))
    monkeypatch.setattr(streams, "reference", lambda answer: answer)
    client = ChatClient(Address.read("http://127.0.0.1:9"), PLAN.limits)
    session: Any = SimpleNamespace(client=client, plan=PLAN, ask_known=known, ask=wrong)

    async def run() -> str:
        return await streams._kept_connections(session)

    with pytest.raises(Unsound, match="another prompt"):
        asyncio.run(run())
    assert len({id(each) for each in closed}) == streams._CONNECTIONS
