"""What running an image proved: kept beside it, stated, and read back without being believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.artifacts.attest.envelope import enclose
from pipeline.artifacts.attest.keys import LocalSigner, make_private_key
from pipeline.core.errors import RecordInvalid, StoreDamaged
from pipeline.core.verdict import TestVerdict
from pipeline.evidence.statements.evidence_set import (
    NAME,
    read_set,
    readable,
    statements_folder,
    verdict_of,
)
from pipeline.evidence.statements.image import image_statements
from pipeline.evidence.statements.results import read_run_result, run_predicate, run_statements
from pipeline.evidence.statements.stated import (
    SigningProblem,
    find_stated,
    sign_stated,
    state_image,
)
from pipeline.images.gate.runs import ImageRun, RunTest, keep_runs, read_runs, runs_path
from tests.unit.verify.world import World, make_world

DIGEST = "sha256:" + "a" * 64


def a_start(verdict: TestVerdict = "passed", message: str = "") -> ImageRun:
    tests = [
        RunTest(name="argument parser", verdict="passed", message="knows 412 flags"),
        RunTest(name="libraries", verdict=verdict, message=message),
    ]
    return ImageRun(kind="start", machine={"sandbox": "namespaces"}, tests=tests)


def a_ladder(verdict: TestVerdict = "passed", recipe: str = "tiny-cpu") -> ImageRun:
    tests = [
        RunTest(name="first: one answer", verdict="passed"),
        RunTest(name="answers: arithmetic", verdict="skipped", message="the model is tiny"),
        RunTest(name="streams: 64 at once", verdict=verdict, message="2 of 64 empty"),
    ]
    last = "streams" if verdict == "passed" else "first"
    inputs = {f"recipes/{recipe}.yaml": DIGEST}
    return ImageRun(kind="smoke", recipe=recipe, last_good=last, inputs=inputs, tests=tests)


@pytest.fixture
def run_world(tmp_path: Path) -> World:
    return make_world(tmp_path / "run")


def kept(world: World) -> list[ImageRun]:
    return read_runs(world.store, world.built.name, world.built.platform, world.built.digest)


def test_a_later_run_takes_the_place_of_its_like_and_of_no_other(run_world: World) -> None:
    world = run_world
    keep_runs(world.store, world.built, [a_start("failed"), a_ladder("failed")])
    keep_runs(world.store, world.built, [a_start(), a_ladder(recipe="other")])
    verdicts = {run.about: run.verdict for run in kept(world)}
    assert verdicts == {
        "start": "passed",
        "smoke with tiny-cpu": "failed",
        "smoke with other": "passed",
    }


def a_run_of(*verdicts: TestVerdict, weights: str = DIGEST, exchanges: str = "1") -> ImageRun:
    """A run with one check on each rung, as far as there are verdicts."""
    rungs = ["first", "answers", "streams"][: len(verdicts)]
    tests = [
        RunTest(name=f"{rung}: it", verdict=verdict)
        for rung, verdict in zip(rungs, verdicts, strict=True)
    ]
    passed = [t.name.partition(":")[0] for t in tests if t.verdict == "passed"]
    inputs = {"weights": weights, "exchanges.jsonl": "sha256:" + exchanges * 64}
    last = passed[-1] if passed else None
    return ImageRun(kind="smoke", recipe="tiny-cpu", last_good=last, inputs=inputs, tests=tests)


LONG = a_run_of("passed", "passed", "passed")
SHORT = a_run_of("passed", exchanges="2")


@pytest.mark.parametrize(
    "longer", [LONG, a_run_of("passed", "failed"), a_run_of("passed", "unknown", "passed")]
)
def test_a_shorter_ladder_leaves_what_a_longer_one_found(
    run_world: World, longer: ImageRun
) -> None:
    keep_runs(run_world.store, run_world.built, [longer])
    keep_runs(run_world.store, run_world.built, [SHORT])
    assert kept(run_world) == [longer]


@pytest.mark.parametrize(
    ("before", "later"),
    [
        (LONG, a_run_of("failed")),
        (LONG, a_run_of("passed", "failed")),
        (LONG, a_run_of("passed", weights="sha256:" + "b" * 64)),
        (SHORT, LONG),
        (a_run_of("failed"), SHORT),
        (LONG, a_run_of("passed", "passed", "passed", exchanges="3")),
    ],
    ids=["fails", "fails later", "other weights", "longer", "mended", "again"],
)
def test_a_later_ladder_that_fails_or_says_as_much_counts(
    run_world: World, before: ImageRun, later: ImageRun
) -> None:
    keep_runs(run_world.store, run_world.built, [before])
    keep_runs(run_world.store, run_world.built, [later])
    assert kept(run_world) == [later]


def test_runs_of_other_bytes_say_nothing_about_an_image(run_world: World) -> None:
    world = run_world
    keep_runs(world.store, world.built, [a_start()])
    assert len(kept(world)) == 1
    assert read_runs(world.store, world.built.name, world.built.platform, DIGEST) == []


def test_a_damaged_record_is_named_and_the_next_run_replaces_it(run_world: World) -> None:
    world = run_world
    keep_runs(world.store, world.built, [a_ladder()])
    path = runs_path(world.store, world.built.name, world.built.platform)
    path.write_text("{")
    with pytest.raises(StoreDamaged, match=r"runs\.json"):
        kept(world)
    keep_runs(world.store, world.built, [a_start()])
    assert [run.about for run in kept(world)] == ["start"]


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [
        (["passed", "skipped"], "passed"),
        (["passed", "unknown"], "unknown"),
        (["passed", "unknown", "failed"], "failed"),
        (["skipped"], "unknown"),
        ([], "unknown"),
    ],
)
def test_the_verdict_is_counted_from_the_tests(verdicts: list[TestVerdict], wanted: str) -> None:
    tests = [RunTest(name=f"test {n}", verdict=v) for n, v in enumerate(verdicts)]
    run = ImageRun(kind="start", tests=tests)
    assert run.verdict == wanted
    predicate = run_predicate(run)
    assert read_run_result(predicate).verdict == wanted
    assert predicate["result"] == ("PASSED" if wanted == "passed" else "FAILED")


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "start", "recipe": "tiny-cpu"},
        {"kind": "start", "last_good": "first"},
        {"kind": "smoke"},
    ],
)
def test_a_run_has_what_its_kind_has_and_nothing_else(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ImageRun.model_validate({"tests": [], **wrong})


def test_a_run_says_in_one_line_how_far_the_image_was_proved() -> None:
    assert a_start().summary() == "starts"
    assert a_start("failed").summary() == "does not start"
    assert a_start("unknown").summary() == "not known whether it starts"
    assert a_ladder().summary() == "smoke up to streams with tiny-cpu"
    assert a_ladder("failed").summary() == "smoke up to first with tiny-cpu (failed after it)"


def test_a_failed_ladder_is_stated_with_its_reasons_and_what_was_skipped() -> None:
    predicate = run_predicate(a_ladder("failed"))
    assert predicate["failedTests"] == ["streams: 64 at once"]
    assert predicate["sm120_why"] == [{"test": "streams: 64 at once", "why": "2 of 64 empty"}]
    skipped = {"test": "answers: arithmetic", "why": "the model is tiny"}
    assert predicate["sm120_skipped"] == [skipped]
    assert predicate["configuration"][0]["name"] == "recipes/tiny-cpu.yaml"
    result = read_run_result(predicate)
    assert (result.verdict, result.last_good, result.recipe) == ("failed", "first", "tiny-cpu")


LIES: dict[str, dict[str, Any]] = {
    "a failure called success": {"sm120_verdict": "passed", "result": "PASSED"},
    "a success of nothing": {"passedTests": [], "failedTests": []},
    "in-toto's field alone": {"result": "PASSED"},
    "a rung that failed": {"sm120_lastGood": "streams"},
    "a rung that was not run": {"sm120_lastGood": "memory"},
    "a start with a recipe": {"sm120_run": "start"},
    "another kind of run": {"sm120_run": "benchmark"},
    "a field that nobody knows": {"sm120_more": 1},
    "a warning, which runs do not have": {"warnedTests": ["streams: 64 at once"]},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_result_that_contradicts_itself_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(RecordInvalid):
        read_run_result({**run_predicate(a_ladder("failed")), **lie})


def test_a_ladder_without_a_rung_has_not_passed() -> None:
    with pytest.raises(RecordInvalid, match="no rung"):
        read_run_result({**run_predicate(a_ladder()), "sm120_lastGood": None})


def test_each_run_has_a_statement_that_a_set_lists_with_its_verdict(run_world: World) -> None:
    world = run_world
    keep_runs(world.store, world.built, [a_start(), a_ladder("failed")])
    state_image(world.checkout, world.store, world.built, [])
    envelopes = readable(statements_folder(world.store, world.built))
    listed = {(c.about, c.verdict) for c in read_set(envelopes[NAME].statement).statements}
    assert {("start", "passed"), ("smoke with tiny-cpu", "failed")} <= listed
    assert {"run-start", "run-smoke-tiny-cpu"} <= envelopes.keys()
    assert verdict_of(envelopes["run-start"].statement) == ("start", "passed")
    assert envelopes["run-start"].statement.is_about(world.built.digest)


def test_a_new_run_makes_the_statements_out_of_date(run_world: World) -> None:
    world = run_world
    about = (world.checkout, world.store, world.built)
    state_image(*about, [])
    assert find_stated(*about)
    keep_runs(world.store, world.built, [a_start()])
    assert find_stated(*about) is None
    assert "run-start" in image_statements(*about)


def test_runs_that_were_stated_without_a_key_are_signed_later(run_world: World) -> None:
    world, signer = run_world, LocalSigner(make_private_key())
    about = (world.checkout, world.store, world.built)
    keep_runs(world.store, world.built, [a_start()])
    state_image(*about, [])
    assert sign_stated(*about, signer) == {}
    signatures = readable(statements_folder(world.store, world.built))["run-start"].signatures
    assert [s.key_id for s in signatures] == [signer.key_id]


def test_a_planted_run_is_not_signed(run_world: World) -> None:
    world, signer = run_world, LocalSigner(make_private_key())
    about = (world.checkout, world.store, world.built)
    keep_runs(world.store, world.built, [a_start("failed", "libfoo.so.1 is missing")])
    state_image(*about, [])
    (planted,) = run_statements(world.built.name, world.built.digest, [a_start()]).values()
    path = statements_folder(world.store, world.built) / "run-start.dsse.json"
    path.write_bytes(enclose(planted, []).dump())
    assert sign_stated(*about, signer)["run-start"] is SigningProblem.OTHER


def an_address() -> dict[str, Any]:
    """A smoke test of an address, as it is stated."""
    run = a_ladder().model_copy(update={"kind": "address", "recipe": None})
    return run_predicate(ImageRun.model_validate(run.model_dump()))


def test_a_ladder_of_an_address_states_that_image_weights_and_recipe_are_not_known() -> None:
    result = read_run_result(an_address())
    assert result.behind is not None
    assert set(result.behind) == {"image", "weights", "recipe"}
    assert "of an address" in result.summary()
    assert "sm120_behind" not in run_predicate(a_ladder())


@pytest.mark.parametrize("name", ["image", "weights", "recipe", None])
def test_a_ladder_of_an_address_that_leaves_out_what_it_does_not_know_is_refused(
    name: str | None,
) -> None:
    predicate = an_address()
    if name:
        del predicate["sm120_behind"][name]
    else:
        del predicate["sm120_behind"]
    with pytest.raises(RecordInvalid, match="not known"):
        read_run_result(predicate)


def test_a_ladder_of_a_recipe_cannot_say_that_it_is_of_an_address() -> None:
    behind = {"sm120_behind": an_address()["sm120_behind"]}
    with pytest.raises(RecordInvalid, match="not known"):
        read_run_result({**run_predicate(a_ladder()), **behind})
    with pytest.raises(RecordInvalid):
        read_run_result({**an_address(), "sm120_recipe": "tiny-cpu"})
