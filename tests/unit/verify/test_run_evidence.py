"""What running an image proved, in the eyes of a verifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import Envelope, enclose
from pipeline.artifacts.attest.keys import LocalSigner
from pipeline.artifacts.attest.names import TEST_RESULT
from pipeline.artifacts.attest.statement import state_about, subject
from pipeline.core.model import sha256_of
from pipeline.core.verdict import TestVerdict
from pipeline.evidence.statements.results import read_run_result, run_predicate, run_statements
from pipeline.evidence.verify.chain import VerifyContext, judge_ladder, judge_statement
from pipeline.evidence.verify.evidence import read_item
from pipeline.evidence.verify.verdict import Node, Verdict
from pipeline.evidence.verify.walk import judge_image_run, judge_results
from pipeline.images.gate.runs import ImageRun
from tests.unit.statements.test_runs import a_ladder, a_start
from tests.unit.verify.world import NOW, WHEN, World, make_world, sign_bytes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("runs"))


def stated(world: World, run: ImageRun) -> Envelope:
    (statement,) = run_statements("engine", world.built.digest, [run], WHEN).values()
    return enclose(statement, [LocalSigner(world.key)])


def judged(world: World, run: ImageRun) -> Node:
    return world.judge(run=stated(world, run))


@pytest.mark.parametrize(
    ("verdict", "wanted"),
    [
        ("passed", Verdict.VALID),
        ("skipped", Verdict.VALID),
        ("failed", Verdict.BROKEN),
        ("unknown", Verdict.INCOMPLETE),
    ],
)
def test_an_image_that_does_not_start_breaks_the_chain(
    world: World, verdict: TestVerdict, wanted: Verdict
) -> None:
    node = judged(world, a_start(verdict, "libfoo.so.1 is missing"))
    assert node.verdict is wanted
    own = next(c for c in node.children if c.title == "test-result (run)").children[-1]
    assert own.title == "start"


@pytest.mark.parametrize(
    ("verdict", "wanted"),
    [("failed", Verdict.INCOMPLETE), ("unknown", Verdict.INCOMPLETE)],
)
def test_a_failed_ladder_leaves_the_chain_incomplete(
    world: World, verdict: TestVerdict, wanted: Verdict
) -> None:
    node = judge_results(run_predicate(a_ladder(verdict)), "engine", None)
    assert node.verdict is wanted
    assert "streams: 64 at once" in node.message


def test_a_ladder_is_stale_once_its_recipe_has_changed(world: World, tmp_path: Path) -> None:
    checkout = world.checkout_copy(tmp_path)
    recipe = checkout.root / "recipes" / "tiny-cpu.yaml"
    recipe.parent.mkdir(exist_ok=True)
    recipe.write_text("name: tiny-cpu\n")
    inputs = {
        "recipes/tiny-cpu.yaml": sha256_of(recipe.read_bytes()),
        "weights": "sha256:" + "b" * 64,
    }
    result = read_run_result(run_predicate(a_ladder().model_copy(update={"inputs": inputs})))
    node = judge_image_run(result, checkout)
    assert node.verdict is Verdict.VALID
    assert node.message == "smoke up to streams with tiny-cpu: 2 passed, 1 skipped"
    recipe.write_text("name: tiny-cpu\n# changed\n")
    assert judge_image_run(result, checkout).verdict is Verdict.STALE
    recipe.unlink()
    assert judge_image_run(result, checkout).verdict is Verdict.STALE


def test_a_recipe_outside_the_checkout_is_never_read(world: World) -> None:
    inputs = {"recipes/../../secret": "sha256:" + "b" * 64}
    result = read_run_result(run_predicate(a_ladder().model_copy(update={"inputs": inputs})))
    assert judge_image_run(result, world.checkout).verdict is Verdict.STALE


def test_a_run_that_no_set_lists_was_added_later(world: World) -> None:
    envelopes = {**world.envelopes(), "run-start": stated(world, a_start())}
    node = world.walk(envelopes).node
    assert node.verdict is Verdict.BROKEN
    assert "added later" in node.culprit().message


def test_a_failed_start_that_was_taken_away_is_missed(world: World) -> None:
    failed = stated(world, a_start("failed", "no gcc"))
    envelopes = world.with_set({**world.envelopes(), "run-start": failed})
    del envelopes["run-start"]
    node = world.walk(envelopes).node
    assert node.verdict is Verdict.BROKEN
    assert "test-result start, failed" in node.culprit().title


def test_a_start_does_not_replace_a_gate(world: World) -> None:
    node = world.judge(run=stated(world, a_start()), gate_smem_sm_120=None)
    assert node.verdict is Verdict.INCOMPLETE
    assert node.culprit().title == "gate smem on sm_120"


def test_a_run_alone_is_judged_by_its_form_and_verdict(world: World) -> None:
    context = VerifyContext(world.trust, None, NOW)
    item = read_item("run", stated(world, a_start()).dump())
    assert judge_statement(item, context).node.verdict is Verdict.INCOMPLETE
    item = read_item("run", stated(world, a_start("failed")).dump())
    assert judge_statement(item, context).node.verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("exchanges", "verdict", "message"),
    [
        (b"asked and answered", Verdict.VALID, "these bytes"),
        (b"edited", Verdict.BROKEN, f"has {sha256_of(b'edited')}, which was not stated"),
        (None, Verdict.INCOMPLETE, "is not beside the result"),
    ],
)
@pytest.mark.parametrize("name", ["exchanges.jsonl", "quality-exchanges.jsonl"])
def test_a_ladder_needs_the_exchanges_that_were_stated_with_it(
    world: World, tmp_path: Path, name: str, exchanges: bytes | None, verdict: Verdict, message: str
) -> None:
    result, context = tmp_path / "smoke.json", VerifyContext(world.trust, None, NOW)
    result.write_bytes(b"passed")
    if exchanges is not None:
        (tmp_path / name).write_bytes(exchanges)
    about = [subject("smoke.json", sha256_of(b"passed"))]
    about.append(subject(name, sha256_of(b"asked and answered")))
    statement = state_about(about, TEST_RESULT, run_predicate(a_ladder()), WHEN)
    items = [read_item("smoke", enclose(statement, [LocalSigner(world.key)]).dump())]
    node = judge_ladder(result, items, context, name).node
    assert [n.title for n in node.children] == ["test-result (smoke)", name]
    assert (node.children[1].verdict, node.children[1].message) == (verdict, message)
    # a statement of another result speaks of no exchanges
    result.write_bytes(b"failed")
    last = judge_ladder(result, items, context, name).node.children[1]
    assert last.verdict is (Verdict.INCOMPLETE if exchanges is None else Verdict.BROKEN)
    assert judge_ladder(result, [], context, name).node.message == "there is no evidence for it"


@pytest.mark.parametrize(
    "lie",
    [
        {"sm120_verdict": "passed", "result": "PASSED"},
        {"sm120_run": "bench"},
        {"sm120_run": None},
        {"failedTests": []},
    ],
)
def test_a_lie_about_a_run_is_broken(world: World, lie: dict[str, Any]) -> None:
    body = json.loads(stated(world, a_start("failed")).payload)
    body["predicate"] |= lie
    signed = sign_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode(), world.key)
    assert world.judge(run=signed).verdict is Verdict.BROKEN
