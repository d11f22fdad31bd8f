"""How far an image was proved, as publish shows it."""

from __future__ import annotations

import pytest

from pipeline.artifacts.store.store import Store
from pipeline.images.gate.runs import keep_runs, runs_path
from pipeline.images.gate.state import GateState, passed_steps
from tests.makers import built_image
from tests.unit.statements.test_runs import a_ladder, a_start

AMD64 = "linux/amd64"
BUILT = built_image("tiny", AMD64, "sha256:" + "a" * 64)
OTHER = built_image("tiny", AMD64, "sha256:" + "b" * 64)
PASSED = GateState(platform=AMD64, state="passed")


def test_an_image_that_nobody_ran_is_assembled_and_gated(store: Store) -> None:
    proof = passed_steps(store, BUILT, PASSED)
    assert proof.steps == ["assembled", "gated", "start not tried", "no smoke ladder"]
    assert proof.sentence() == "linux/amd64: assembled, gated, start not tried, no smoke ladder"


def test_every_run_that_counts_is_shown(store: Store) -> None:
    keep_runs(store, BUILT, [a_start(), a_ladder(), a_ladder("failed", "eagle3")])
    assert passed_steps(store, BUILT, PASSED).steps[2:] == [
        "starts",
        "smoke up to first with eagle3 (failed after it)",
        "smoke up to streams with tiny-cpu",
    ]


def test_an_image_that_does_not_start_says_so(store: Store) -> None:
    keep_runs(store, BUILT, [a_start("failed", "libfoo.so.1 is missing")])
    assert "does not start" in passed_steps(store, BUILT, PASSED).steps


def test_runs_of_another_image_prove_nothing(store: Store) -> None:
    keep_runs(store, OTHER, [a_start(), a_ladder()])
    assert passed_steps(store, BUILT, PASSED).steps[2:] == ["start not tried", "no smoke ladder"]


def test_a_damaged_record_proves_nothing(store: Store) -> None:
    keep_runs(store, BUILT, [a_start()])
    runs_path(store, "tiny", AMD64).write_text("{")
    assert "starts" not in passed_steps(store, BUILT, PASSED).steps


@pytest.mark.parametrize(
    ("state", "step"), [("no gates", "has no gates"), ("not passed", "not gated")]
)
def test_gates_that_did_not_pass_are_not_hidden(store: Store, state: str, step: str) -> None:
    gates = GateState.model_validate({"platform": AMD64, "state": state})
    assert passed_steps(store, BUILT, gates).steps[1] == step
