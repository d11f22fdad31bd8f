"""A whole run of the gate in this process, with a worker that knows its answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.cli.gate_tables import show_kernels
from pipeline.core.errors import GateInvalid
from pipeline.images.assemble.plan import GATE_WORKER, program_digest
from pipeline.images.gate.files import EngineSetup
from pipeline.images.gate.smem.cases import GateFile, Gates
from pipeline.images.gate.smem.engine import EngineTree
from pipeline.images.gate.smem.image_gate import (
    ImageGate,
    chosen_cases,
    find_case,
    run_gate,
)
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.results import GateResult
from pipeline.images.gate.stage import run_numerics
from pipeline.images.spec.image import PatchSeries
from tests import makers
from tests.unit.gate.smem.test_run import FACTS, HEAD, ThisPython, worker

CARD = card_for("sm_120")
SPEC = {
    "name": "decode",
    "stands_for": ["a model"],
    "function": ["engine.ops:decode"],
    "dims": {"heads": 8},
    "each": {"tokens": [1, 64]},
    "arguments": {"o": {"tensor": {"shape": ["tokens", "heads"], "dtype": "float32"}}},
    "kernels": ["_fwd"],
}
OTHER = {**SPEC, "name": "extend", "each": {}, "dims": {"heads": 8, "tokens": 4}}
# One kernel a case; what it needs is its case's name, in bytes.
ANSWERS = """
NEED = {"extend": 200000}
for case in job["cases"]:
    begin(case)
    kernel = {"kernel": "_fwd", "module": "engine.ops", "shared_bytes": NEED.get(case["name"], 9)}
    numbers = [{"output": "o", "elements": 8, "unwritten": 0, "max_error": 0.0, "max_share": 0.0}]
    say({"case": case["name"], "ended": "called", "records": [kernel],
         "computed": numbers if job["interpret"] else []})
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageGate:
    worker(monkeypatch, tmp_path, HEAD + ANSWERS)
    return make_gate(tmp_path)


def make_gate(tmp_path: Path) -> ImageGate:
    """The gate of an engine with two kernels and three cases."""
    folder = tmp_path / "tree"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "ops.py").write_text(
        "import triton\n\n@triton.jit\ndef _fwd(x):\n    pass\n"
        "\ndef decode(o):\n    _fwd[(1,)](o)\n"
        "\n@triton.jit\ndef _other(x):\n    pass\n\ndef more(o):\n    _other[(1,)](o)\n"
    )
    file = GateFile.model_validate(
        {"engine": "engine", "why": "to see a whole run of the gate", "cases": [SPEC, OTHER]}
    )
    gates = Gates(setup=EngineSetup(package="engine"), gates={"smem-decode": file})
    spec: Any = SimpleNamespace(name="tiny", patches=None)
    plan: Any = SimpleNamespace(spec=spec, platform="linux/amd64", key="k")
    checkout = SimpleNamespace(folder=lambda name: tmp_path, other_series=lambda spec: {})
    context: Any = SimpleNamespace(
        store=open_store(tmp_path / "store"), checkout=checkout, ask=None
    )
    asked = {"smem-decode": {"decode": {"reference": "decode-attention", "outputs": ["o"]}}}
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates" / "numerics.yaml").write_text(json.dumps(asked))
    return ImageGate(
        context,
        plan,
        gates,
        ThisPython(tmp_path / "environment", FACTS, ()),
        EngineTree(folder, "engine", "1", f"sha256:{'0' * 64}"),
        PatchSeries(patches=[]),
    )


def verdicts(result: GateResult) -> dict[str, str]:
    return {case.name: case.verdict for case in result.cases}


def test_every_case_is_judged_and_the_worst_is_the_verdict(gate: ImageGate) -> None:
    result = run_gate(gate, CARD)
    assert verdicts(result) == {"decode-1": "passed", "decode-64": "passed", "extend": "failed"}
    assert (result.verdict, result.patches, result.numerics) == ("failed", [], None)
    assert result.engine_digest == gate.tree.digest
    assert result.worker == program_digest(GATE_WORKER)
    assert result.sandbox is not None
    assert "environment" in result.sandbox.held
    assert result.coverage is not None
    assert (result.coverage.kernels, result.coverage.reached) == (2, 1)
    assert [(k.module, k.name) for k in result.coverage.rest] == [("engine.ops", "_other")]


def test_some_of_the_cases_say_nothing_about_the_image_or_its_coverage(gate: ImageGate) -> None:
    result = run_gate(gate, CARD, only="decode-*")
    assert verdicts(result) == {"decode-1": "passed", "decode-64": "passed"}
    assert (result.verdict, result.coverage, result.image_digest) == ("passed", None, None)


def test_a_built_image_is_named_only_by_a_whole_run_of_its_own_patches(
    gate: ImageGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = f"sha256:{'a' * 64}"
    record = makers.image_record(digest).model_copy(update={"key": "k"})
    monkeypatch.setattr(gate.context.store, "image_record", lambda name, platform: record)
    assert run_gate(gate, CARD).image_digest == digest
    assert run_gate(gate, CARD, unpatched=True).image_digest is None
    assert run_gate(gate, CARD, only="decode-1").image_digest is None
    record = makers.image_record(digest)
    assert run_gate(gate, CARD).image_digest is None


def test_passed_cases_without_a_number_check_are_counted(gate: ImageGate) -> None:
    silent = run_gate(gate, CARD)
    assert silent.without_numbers == ["decode-1", "decode-64"]
    assert "The numerics of 2 passed cases were not checked" in show_kernels(silent)
    report = run_numerics(gate, CARD, run_gate(gate, CARD)).result
    assert report is not None
    assert report.numerics is not None
    assert report.numerics.verdict == "right"
    # every size of a case counts as checked with it; `extend` failed and is not counted
    assert report.without_numbers == []
    assert "without a check of their numerics: 0 of 2" in show_kernels(report)


@pytest.mark.parametrize("verdict", ["wrong", "unknown"])
def test_numbers_that_are_not_right_are_no_check(gate: ImageGate, verdict: str) -> None:
    report = run_numerics(gate, CARD, run_gate(gate, CARD)).result
    assert report is not None
    assert report.numerics is not None
    bad = [case.model_copy(update={"verdict": verdict}) for case in report.numerics.cases]
    result = report.model_copy(
        update={"numerics": report.numerics.model_copy(update={"cases": bad})}
    )
    assert result.without_numbers == ["decode-1", "decode-64"]
    assert "without a check of their numerics: 2 of 2" in show_kernels(result)


def test_cases_are_chosen_by_pattern(gate: ImageGate) -> None:
    cases = gate.gates.cases()
    assert [case.name for case in chosen_cases(cases, None)] == ["decode-1", "decode-64", "extend"]
    assert [case.name for case in chosen_cases(cases, "*-64")] == ["decode-64"]
    assert find_case(gate.gates, "extend").name == "extend"


@pytest.mark.parametrize("pattern", ["decode", "Decode-1", "decode-2*", ""])
def test_a_pattern_that_no_case_fits_is_an_error_that_names_them(
    gate: ImageGate, pattern: str
) -> None:
    with pytest.raises(GateInvalid, match="decode-1, decode-64, extend"):
        chosen_cases(gate.gates.cases(), pattern)
    with pytest.raises(GateInvalid, match="decode-1, decode-64, extend"):
        find_case(gate.gates, pattern)
