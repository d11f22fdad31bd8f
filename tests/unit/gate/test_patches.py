"""What a patch is, from the results of its gate with it and without it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from packaging.version import Version

from pipeline.core.errors import GateInvalid
from pipeline.images.gate.parsers.judge import ParserResult
from pipeline.images.gate.patches import (
    PatchVerdict,
    State,
    decide,
    judge_chat_patch,
    unproved,
    versions_against,
    without_gate,
)
from pipeline.images.gate.smem.engine import EngineTree, compiler_requirements, is_applied
from pipeline.images.gate.smem.results import CaseResult
from pipeline.images.spec.image import PatchSeries, PatchSpec
from tests.makers import patch_spec
from tests.unit.gate.smem.test_results import judged, record

OVER, FITS = record(106496), record(71680)


def state(
    without: list[CaseResult],
    with_patch: list[CaseResult] | None,
    *,
    applied: bool = False,
) -> str:
    return decide(without, with_patch, applied=applied, conflict="line 64 is other")[0]


def test_a_patch_that_makes_the_gate_pass_is_needed() -> None:
    assert state([judged(OVER)], [judged(FITS)]) == "needed"


def test_a_patch_that_changes_nothing_is_inert() -> None:
    assert state([judged(OVER)], [judged(OVER)]) == "inert"


def test_a_patch_that_changes_something_but_not_enough_is_weak() -> None:
    assert state([judged(OVER)], [judged(record(105000))]) == "weak"


def test_a_gate_that_passes_without_the_patch_supersedes_it() -> None:
    assert state([judged(FITS)], [judged(FITS)]) == "superseded"
    assert state([judged(FITS)], None) == "superseded"


def test_upstream_with_the_same_lines_is_upstreamed_not_superseded() -> None:
    assert state([judged(FITS)], None, applied=True) == "upstreamed"


def test_the_same_lines_are_no_proof_while_the_gate_fails() -> None:
    assert state([judged(OVER)], None, applied=True) == "conflict"


def test_a_patch_that_does_not_apply_where_it_is_wanted_is_a_conflict() -> None:
    result, message = decide([judged(OVER)], None, applied=False, conflict="line 64 is other")
    assert (result, message) == ("conflict", "line 64 is other")


@pytest.mark.parametrize("after", [[judged(FITS)], [judged()], None])
def test_a_gate_that_cannot_be_judged_proves_nothing(after: list[CaseResult] | None) -> None:
    assert state([judged()], after) == "unknown"


def test_unknown_with_the_patch_is_not_needed() -> None:
    assert state([judged(OVER)], [judged(ended="died")]) == "unknown"


def test_only_a_needed_patch_or_one_for_no_gate_may_be_in_a_build() -> None:
    states = get_args(State)
    result = [PatchVerdict(patch=s, gate="smem", version="1", state=s, message="") for s in states]
    good = {"needed", "no gate"}
    assert {v.state for v in unproved(result)} == set(states) - good
    assert good < set(states)


def test_a_patch_that_is_not_about_a_kernel_is_shown_with_its_reason() -> None:
    spec = PatchSpec.model_validate(
        patch_spec(
            file="0002.patch", gate=None, no_gate="changes a greeting", files=[{"path": "a"}]
        )
    )
    verdict = without_gate(spec, "1.0")
    assert (verdict.state, verdict.message) == ("no gate", "changes a greeting")


def test_a_fix_that_upstream_took_over_is_recognised_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "p.patch").write_text(
        "--- a/engine/x.py\n+++ b/engine/x.py\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    )
    spec = PatchSpec.model_validate(
        {
            "file": "p.patch",
            "why": "because a test wants to see it",
            "upstream": ["https://example.org"],
            "applies_to": "engine",
            "gate": "smem-decode",
            "files": [
                {
                    "path": "engine/x.py",
                    "before": f"sha256:{'0' * 64}",
                    "after": f"sha256:{'1' * 64}",
                }
            ],
        }
    )
    tree = EngineTree(tmp_path / "tree", "engine", "2", f"sha256:{'2' * 64}")
    (tree.folder / "engine").mkdir(parents=True)
    (tree.folder / "engine" / "x.py").write_text("zero\none\nthree\n")
    assert is_applied(tree, spec, tmp_path)
    (tree.folder / "engine" / "x.py").write_text("zero\none\ntwo\n")
    assert not is_applied(tree, spec, tmp_path)
    (tree.folder / "engine" / "x.py").unlink()
    assert not is_applied(tree, spec, tmp_path)


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (["torch==2.9.1", "triton==3.5.1", "numpy"], ["torch==2.9.1", "triton==3.5.1"]),
        (["Torch (>=2.0)"], ["Torch>=2.0"]),
        (['torch==2.1; extra == "old"', "torchvision", "triton-kernels"], []),
        (['torch==2.9.1; platform_machine == "x86_64"'], None),
        (["torch ==", "not a requirement !!"], []),
        ([], []),
    ],
)
def test_what_a_version_asks_for_is_read_from_its_own_metadata(
    tmp_path: Path, lines: list[str], want: list[str] | None
) -> None:
    info = tmp_path / "engine-1.0.dist-info"
    info.mkdir()
    head = "Metadata-Version: 2.1\nName: engine\n" + "".join(
        f"Requires-Dist: {line}\n" for line in lines
    )
    (info / "METADATA").write_text(f"{head}\nRequires-Dist: torch==0.1\n")
    result = compiler_requirements(EngineTree(tmp_path, "engine", "1.0", "sha256:" + "0" * 64))
    if want is None:
        assert result == ['torch==2.9.1; platform_machine == "x86_64"']
    else:
        assert result == want


def test_a_version_without_metadata_asks_for_nothing(tmp_path: Path) -> None:
    tree = EngineTree(tmp_path, "engine", "1.0", "sha256:" + "0" * 64)
    assert compiler_requirements(tree) == []


def test_a_gate_that_passes_before_the_locked_version_does_not_need_the_patch_yet() -> None:
    older = decide([judged(FITS)], None, applied=False, conflict="", is_older=True)
    assert older[0] == "not needed yet"
    assert decide([judged(FITS)], None, applied=False, conflict="")[0] == "superseded"


def test_code_that_an_older_version_does_not_have_yet_is_not_unknown_there() -> None:
    gone = [judged(ended="function gone")]

    def state(*, is_older: bool, is_absent: bool) -> str:
        age = {"is_older": is_older, "is_absent": is_absent}
        return decide(gone, None, applied=False, conflict="", **age)[0]

    assert state(is_older=True, is_absent=True) == "not needed yet"
    # moved elsewhere, or gone from a newer version: nobody has seen whether it fits
    assert state(is_older=True, is_absent=False) == "unknown"
    assert state(is_older=False, is_absent=True) == "unknown"


@pytest.mark.parametrize("result", [judged(OVER), judged(ended="died"), judged()])
def test_an_older_version_that_fails_or_was_not_judged_is_no_better_for_its_age(
    result: CaseResult,
) -> None:
    newer = decide([result], [result], applied=False, conflict="")[0]
    assert decide([result], [result], applied=False, conflict="", is_older=True)[0] == newer
    assert newer in ("inert", "unknown")


@dataclass(frozen=True)
class Offers:
    """What an index has of an engine."""

    known: tuple[str, ...]

    def versions(self, project: str, *, withdrawn: bool = False) -> list[Version]:
        return [Version(v) for v in self.known]


LOCKED: Any = SimpleNamespace(name="sglang", version="0.5.8.post1")


def offering(*known: str) -> Any:
    return SimpleNamespace(make_finder=lambda: Offers(known))


def test_versions_that_the_index_has_are_judged_in_the_order_they_were_named() -> None:
    index = offering("0.5.9", "0.5.10")
    assert versions_against(index, LOCKED, "0.5.10, 0.5.9") == ["0.5.10", "0.5.9"]
    # the locked one needs no index
    assert versions_against(offering(), LOCKED, "0.5.8.post1") == ["0.5.8.post1"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("9.9.9", "sglang 9.9.9: no index has a wheel of this version"),
        ("0.5.9,9.9.9", "sglang 9.9.9"),
        ("0.5", "its newest: 0.5.9, 0.5.10"),
        (">=7", "no published version matches >=7"),
        ("latest", "neither a version nor a range"),
        ("", "neither a version nor a range"),
        (",", "neither a version nor a range"),
    ],
)
def test_a_version_that_nobody_has_ends_the_command(wanted: str, message: str) -> None:
    with pytest.raises(GateInvalid, match=re.escape(message)):
        versions_against(offering("0.5.9", "0.5.10"), LOCKED, wanted)


@pytest.mark.parametrize(
    ("version", "files", "want"),
    [
        ("1.0", {}, "not needed yet"),
        # such as an import that fails outside the server: nothing is known of the patch
        ("1.0", {"engine/parser.py": "other\n"}, "unknown"),
        ("3.0", {}, "unknown"),
    ],
)
def test_a_parser_that_cannot_be_run_in_an_older_version_is_unknown_and_not_absent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    files: dict[str, str],
    want: str,
) -> None:
    diff = "--- a/engine/parser.py\n+++ b/engine/parser.py\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    (tmp_path / "0001.patch").write_text(diff)
    tree = EngineTree(tmp_path / "tree", "engine", version, f"sha256:{'2' * 64}")
    for path, text in {"engine/__init__.py": "", **files}.items():
        (tree.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (tree.folder / path).write_text(text)
    about = {"applies_to": "engine==2.0", "gate": "parsers-kimi"}
    spec = PatchSpec.model_validate(patch_spec(**about, files=[{"path": "engine/parser.py"}]))
    case = {"name": "kimi/call", "family": "kimi", "parsers": {}, "stands_for": []}
    lost = ParserResult.model_validate({**case, "verdict": "unknown", "message": "ImportError"})
    parsing: Any = SimpleNamespace(
        gates=SimpleNamespace(cases=[SimpleNamespace(family="kimi")]),
        environment=SimpleNamespace(facts=SimpleNamespace(python="3.11")),
        judge=lambda *_, **__: [lost],
    )
    monkeypatch.setattr("pipeline.images.gate.patches.open_parser_gate", lambda *_: parsing)
    series = PatchSeries(patches=[spec])
    gate: Any = SimpleNamespace(
        **{"context": None, "plan": None, "series": series, "patch_folder": tmp_path, "tree": tree}
    )
    assert judge_chat_patch(gate, tree, spec).state == want
