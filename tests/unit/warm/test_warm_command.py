"""`sm120 image warm` where there is nothing to compile, and what its report says."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.app import warm
from pipeline.app.build import BuildRequest, missing_warm, plan_build, plan_images
from pipeline.app.gate import make_gate_context
from pipeline.app.warm import LibraryNeeds, WarmRequest, report_warm, warm_image
from pipeline.app.workspace import Workspace
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import SpecInvalid, StepFailed, UnknownImage
from pipeline.images.assemble.plan import WarmPlan, plan_image
from pipeline.images.gate.smem.cases import read_gates
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.gate.smem.results import Record
from pipeline.images.spec.image import Library, WarmSpec
from pipeline.images.warm.layer import (
    INDEX,
    IndexedEntry,
    LackingKernel,
    WarmIndex,
    write_warm,
)
from pipeline.images.warm.modules import IndexedModule, WarmModules
from pipeline.images.warm.target import WarmAnswer
from pipeline.serving.recipe.find import Recipes
from tests.unit.support import Command

ROOT = Path(__file__).resolve().parents[3]
THINKING = "kimi-k2-thinking-nvfp4-sglang-8x"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    open_store(tmp_path / "store")
    return Workspace(ROOT, tmp_path / "store")


def plan_here(workspace: Workspace) -> WarmPlan:
    plan = plan_image(workspace.checkout(), "sglang-k2-warm", "linux/amd64").warm
    assert plan
    return plan


def test_an_image_without_it_names_the_one_that_has_it(workspace: Workspace) -> None:
    with pytest.raises(UnknownImage, match="sglang-k2: its spec has no `warm`") as caught:
        warm_image(workspace, WarmRequest("sglang-k2"))
    assert "sm120 image warm sglang-k2-warm" in str(caught.value.hint)


def test_a_recipe_that_it_does_not_name_is_an_error(workspace: Workspace) -> None:
    for ask in (warm_image, report_warm):
        with pytest.raises(SpecInvalid, match="has no recipe 'gpt-oss'") as caught:
            ask(workspace, WarmRequest("sglang-k2-warm", recipes=("gpt-oss",)))
        assert THINKING in str(caught.value)


@pytest.mark.parametrize(
    ("ended", "records", "hint"),
    [
        ("died", [], "Run it again"),
        ("not imported", [], "Run it again"),
        ("raised", [], "sm120 gate run sglang-k2 --case extend"),
        ("raised", [Record(kernel="k", module="m", error="ptxas failed")], None),
        ("called", [Record(kernel="k", module="m", error="error code -9")], "Run it again"),
        ("called", [], None),
    ],
)
def test_a_case_that_could_not_be_called_leaves_no_layer_without_its_kernels(
    ended: Any,
    records: list[Record],
    hint: str | None,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = WarmAnswer(case="extend", ended=ended, message="index", records=records)
    gate = SimpleNamespace(gates=SimpleNamespace(cases=list))
    monkeypatch.setattr(warm, "open_gate", lambda *_: gate)
    monkeypatch.setattr(warm, "open_warm", lambda *_: nullcontext())
    monkeypatch.setattr(warm, "kept_or_asked", lambda *_: [(None, answer, False)])
    monkeypatch.setattr(warm, "module_cases", lambda *_: [])
    monkeypatch.setattr(warm, "compile_python", lambda *_: {})
    monkeypatch.setattr(warm, "pack_entries", lambda *_: (None, {}))
    plan = plan_here(workspace)
    plan = replace(plan, spec=plan.spec.model_copy(update={"recipes": {}}))
    context = make_gate_context(workspace)
    if hint is None:
        assert warm.compile_entries(context, plan, ())[1] == {}
        return
    with pytest.raises(StepFailed, match=f"1 case without an answer; extend {ended}") as caught:
        warm.compile_entries(context, plan, ())
    assert hint in str(caught.value.hint)


def test_without_a_layer_every_kernel_is_missing(workspace: Workspace) -> None:
    triton, *others = report_warm(workspace, WarmRequest("sglang-k2-warm", recipes=(THINKING,)))
    assert (triton.library, triton.state, triton.present) == ("Triton", "missing", 0)
    assert triton.needed == len(triton.missing)
    assert triton.needed
    assert "there is no layer yet" in triton.reason
    flashinfer, *none_needed, compiled_late = others
    # no layer holds them yet
    assert (flashinfer.state, flashinfer.needed, flashinfer.present) == ("missing", 2, 0)
    assert flashinfer.missing == [
        "fp4_quantization_120: not compiled",
        "fp4_gemm_cutlass_sm120: not compiled",
    ]
    assert {row.state for row in none_needed} == {"none needed"}
    assert "sglang/srt/layers/quantization/fp8_utils.py" in none_needed[1].reason
    assert (compiled_late.library, compiled_late.state) == ("torch.compile", "unknown")


def rows_of(workspace: Workspace, changes: dict[str, Any], held: WarmModules | None) -> Any:
    """What is reported of each library where the spec says something else."""
    plan = plan_here(workspace)
    plan = replace(plan, spec=plan.spec.model_copy(update=changes))
    index = WarmIndex(
        image="sglang-k2",
        card="sm_120",
        triton="3.5.1",
        site="/opt/venv",
        entries={},
        missing=[],
        modules=held,
    )
    known: list[Library] = ["FlashInfer", "CuTe DSL", "DeepGEMM"]
    return [warm.LibraryNeeds.of(plan, index, THINKING, library) for library in known]


def test_what_nobody_looked_at_stays_unknown(workspace: Workspace) -> None:
    rows = rows_of(workspace, {"modules": [], "findings": []}, None)
    assert [(row.state, row.needed, row.present) for row in rows] == [("unknown", None, 0)] * 3
    assert "flashinfer-python 0.6.1 compiles at run time; no case calls it" in rows[0].reason
    # what is known of other recipes says nothing of this one
    finding = plan_here(workspace).spec.findings[1].model_copy(update={"recipes": ["glm-*"]})
    rows = rows_of(workspace, {"modules": [], "findings": [finding]}, None)
    assert [row.state for row in rows] == ["unknown"] * 3


def test_modules_count_by_what_the_layer_has_of_them(workspace: Workspace) -> None:
    quantization, gemm = plan_here(workspace).spec.modules
    entry = IndexedModule(
        make=quantization.make, sha256="0" * 64, size_bytes=1, recipes=quantization.recipes
    )
    held = WarmModules(
        flashinfer="0.6.1",
        architectures="12.0a",
        site="/opt/venv",
        entries={quantization.name: entry},
    )
    row, *_ = rows_of(workspace, {}, held)
    assert (row.state, row.needed, row.present) == ("missing", 2, 1)
    assert row.missing == ["fp4_gemm_cutlass_sm120: not compiled"]
    slow = gemm.model_copy(update={"left_out": "it takes an hour"})
    row, *_ = rows_of(workspace, {"modules": [quantization, slow]}, held)
    assert row.missing == ["fp4_gemm_cutlass_sm120: it takes an hour"]
    row, *_ = rows_of(workspace, {"modules": [quantization]}, held)
    assert (row.state, row.needed, row.present, row.missing) == ("present", 1, 1, [])
    row, *_ = rows_of(workspace, {"modules": [quantization], "findings": []}, held)
    # what nobody looked for is not known to be there
    assert (row.state, row.needed, row.present) == ("unknown", 1, 1)
    assert "others are not known" in row.reason
    finding = plan_here(workspace).spec.findings[1]
    missing = finding.model_copy(update={"library": "FlashInfer", "state": "missing"})
    row, *_ = rows_of(workspace, {"modules": [quantization], "findings": [missing]}, held)
    # all that is listed is there, and more is known to be called
    assert (row.state, row.needed, row.present) == ("missing", 1, 1)
    assert finding.reason in row.missing[0]


def test_the_report_counts_what_the_layer_has_and_says_why_not(workspace: Workspace) -> None:
    plan = plan_here(workspace)
    kept = IndexedEntry(
        kernel="_fwd_kernel",
        module="sglang.x",
        files={"_fwd_kernel.cubin": "0" * 64},
        cases=["extend-mla-576-512"],
    )
    # another of its variants is there
    lack = LackingKernel(case="extend-mla-192-128", kernel="_fwd_kernel", reason="ptxas died")
    kept = kept.model_copy(update={"cases": [*kept.cases, lack.case]})
    index = WarmIndex(
        image="sglang-k2",
        card="sm_120",
        triton="3.5.1",
        site="/opt/venv",
        entries={"A" * 52: kept},
        missing=[lack],
    )
    write_warm(open_store(workspace.store_root()), plan, {INDEX: index.model_dump_json().encode()})
    rows = report_warm(workspace, WarmRequest("sglang-k2-warm"))
    assert {row.recipe for row in rows} == {THINKING, "kimi-k2-instruct-sglang-8x"}
    triton = next(row for row in rows if (row.recipe, row.library) == (THINKING, "Triton"))
    assert (triton.state, triton.present) == ("missing", 1)
    assert "extend-mla-192-128: _fwd_kernel: ptxas died" in triton.missing
    assert not any(line.startswith("extend-mla-576-512: ") for line in triton.missing)


def report_of(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, patterns: list[str], **variables: str
) -> dict[str, LibraryNeeds]:
    """The rows of a recipe with these variables, where the layer has all that is asked."""
    plan = plan_here(workspace)
    plan = replace(
        plan, spec=plan.spec.model_copy(update={"recipes": {THINKING: patterns}, "modules": []})
    )
    cases = read_gates(workspace.checkout(), "sglang-k2").cases()
    entries = {
        f"{i:052}": IndexedEntry(kernel=kernel, module="m", files={}, cases=[case.name])
        for i, (case, kernel) in enumerate((c, k) for c in cases for k in c.kernels)
    }
    index = WarmIndex(
        image="sglang-k2", card="sm_120", triton="3", site="/s", entries=entries, missing=[]
    )
    monkeypatch.setattr(warm, "_warm_plan", lambda *_: plan)
    monkeypatch.setattr(warm, "read_warm", lambda *_: index)
    true = Recipes.read

    def read(recipes: Recipes, asked: str) -> Any:
        return true(recipes, asked).model_copy(update={"environment": {"ours": variables}})

    monkeypatch.setattr(Recipes, "read", read)
    request = WarmRequest("sglang-k2-warm", recipes=(THINKING,))
    return {row.library: row for row in report_warm(workspace, request)}


@pytest.mark.parametrize(
    "variables",
    [
        {"TRITON_PTXAS_PATH": "/usr/bin/ptxas"},
        {"TRITON_CACHE_MANAGER": "mine:Cache"},
        {"SM120_WARM": "/nowhere"},
    ],
)
def test_a_recipe_with_other_variables_for_compilers_is_not_covered(
    variables: dict[str, str], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = report_of(workspace, monkeypatch, ["extend-mla-*"], **variables)["Triton"]
    assert row.state == "unknown"
    assert f"the recipe sets {next(iter(variables))}=" in row.reason


def test_a_recipe_with_the_variables_of_the_image_is_covered(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = {"FLASHINFER_CUDA_ARCH_LIST": "12.0a", "TRITON_CACHE_DIR": "/c", "NCCL_DEBUG": "INFO"}
    row = report_of(workspace, monkeypatch, ["extend-mla-*"], **same)["Triton"]
    assert (row.state, row.missing) == ("present", [])


def test_a_pattern_that_fits_no_case_covers_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = report_of(workspace, monkeypatch, ["extend-mla-*", "renamed-*"])["Triton"]
    assert (row.state, row.needed) == ("unknown", None)
    assert "'renamed-*' under `warm: recipes:` fits no case" in row.reason


@pytest.mark.parametrize("words", [["--arch", "sm_90"], ["--output", "x"]])
def test_a_report_takes_no_option_for_compiling(words: list[str], sm120: Command) -> None:
    ended = sm120("image", "warm", "sglang-k2-warm", "--report", *words)
    assert (ended.code, "a report compiles nothing" in ended.err) == (2, True)


def test_every_pattern_of_a_shipped_warm_image_fits_a_case(workspace: Workspace) -> None:
    checkout = workspace.checkout()
    for name in checkout.images():
        spec = checkout.spec(name)
        if spec.warm is None or spec.base is None:
            continue
        cases = [case.name for case in read_gates(checkout, spec.base).cases()]
        patterns = {pattern for each in spec.warm.recipes.values() for pattern in each}
        assert [p for p in patterns if not any(fnmatchcase(case, p) for case in cases)] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reader": "sha256:0"}, "stale, as reader changed; compiled again"),
        ({"cases": (), "arch": "sm_90"}, "stale, as card, cases changed; compiled again"),
        ({"spec": WarmSpec(recipes={})}, "stale, as recipes, modules changed; compiled again"),
        ({}, ""),
        ({"programs": ("sha256:0",)}, "compiled again: this version of the tool compiles in"),
    ],
)
def test_a_stale_layer_is_made_again_and_what_changed_is_said(
    change: dict[str, Any],
    said: str,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made: list[WarmPlan] = []

    def compile_entries(context: Any, plan: WarmPlan, patterns: Any) -> Any:
        made.append(plan)
        return None, {INDEX: b"{}"}, 0.0

    monkeypatch.setattr(warm, "compile_entries", compile_entries)
    before = plan_here(workspace)
    known = SimpleNamespace(inputs={"warm": before.inputs})
    golden = SimpleNamespace(images={f"{before.image}.amd64": known})
    monkeypatch.setattr(warm, "read_golden", lambda path: golden)
    context, plan = make_gate_context(workspace), replace(before, **change)
    if "programs" in change:
        # an image was built with a layer of other programs
        monkeypatch.setattr(type(context.store), "image_record", lambda *_: object())
    assert missing_warm_of(context, plan)
    warm.make_warm(context, [plan])
    error = capfd.readouterr().err
    assert said in error
    assert ("compiled again" in error) == bool(said)
    assert context.store.layer(plan.key)
    # once: what the store has is not compiled again
    warm.make_warm(context, [plan])
    assert made == [plan]


def missing_warm_of(context: GateContext, plan: WarmPlan) -> bool:
    image = plan_image(context.checkout, plan.image, "linux/amd64")
    return missing_warm(context.store, [replace(image, warm=plan)]) == [plan]


def test_a_plan_names_what_would_be_compiled(workspace: Workspace) -> None:
    planned = plan_images(workspace, ("sglang-k2-warm",))
    assert [each.title for each in planned.warm] == ["sglang-k2-warm warm kernels"]
    assert plan_images(workspace, ("sglang-k2",)).warm == []


def test_a_cold_image_that_nobody_named_is_left_out(
    workspace: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    planned = plan_build(workspace, BuildRequest())
    assert "sglang-k2-warm" not in [plan.spec.name for plan in planned.plans]
    assert "sglang-k2" in [plan.spec.name for plan in planned.plans]
    assert "its kernels are compiled first, for minutes" in capfd.readouterr().err
