"""The results of an image's gates, kept beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import (
    GateFailed,
    GateUnknown,
    GateWrong,
    NoKernelImage,
    PatchUnproved,
    PipelineError,
    StoreDamaged,
)
from pipeline.core.verdict import GateVerdict
from pipeline.images.gate.evidence import (
    Evidence,
    EvidenceRow,
    GateKind,
    ImageGates,
    evidence_path,
    gate_error,
    keep_evidence,
    read_evidence,
)
from pipeline.images.gate.smem.limits import CARDS, card_for
from pipeline.images.gate.stage import ptxas_version

IMAGE, PLATFORM = "engine", "linux/amd64"
DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def evidence(
    gate: GateKind = "smem", verdict: GateVerdict = "passed", arch: str = "sm_120"
) -> Evidence:
    row = EvidenceRow(name="case-1", verdict=verdict, message="the kernel needs 106496 bytes")
    return Evidence(
        gate=gate, arch=arch, verdict=verdict, inputs={"x.whl": OTHER}, made_by={}, rows=[row]
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def keep(store: Store, *evidence: Evidence, digest: str = DIGEST) -> None:
    keep_evidence(store, IMAGE, PLATFORM, digest, evidence)


def test_results_of_several_gates_stand_in_one_file(store: Store) -> None:
    keep(store, evidence("arch"))
    keep(store, evidence("smem"), evidence("patches", "failed"))
    result = read_evidence(store, IMAGE, PLATFORM, DIGEST)
    assert result
    assert [e.gate for e in result.results] == ["smem", "patches", "arch"]
    assert result.verdict == "failed"


@pytest.mark.parametrize("arch", CARDS)
def test_what_was_judged_for_a_card_can_be_read_again(store: Store, arch: str) -> None:
    judged = evidence("smem", arch=arch).model_copy(update={"card": card_for(arch)})
    keep(store, judged)
    result = read_evidence(store, IMAGE, PLATFORM, DIGEST)
    assert result
    assert result.results == [judged]
    assert '"registers_per_sm": 65536' in evidence_path(store, IMAGE, PLATFORM).read_text()


def test_a_newer_result_takes_the_place_of_the_older_one_of_its_gate_and_card(
    store: Store,
) -> None:
    keep(store, evidence("smem", "failed"), evidence("smem", "failed", "sm_90"))
    keep(store, evidence("smem", "passed"))
    result = read_evidence(store, IMAGE, PLATFORM, DIGEST)
    assert result
    assert [(e.arch, e.verdict) for e in result.results] == [
        ("sm_120", "passed"),
        ("sm_90", "failed"),
    ]


def test_another_image_s_results_are_not_taken_over(store: Store) -> None:
    keep(store, evidence("smem"))
    assert read_evidence(store, IMAGE, PLATFORM, OTHER) is None
    keep(store, evidence("arch"), digest=OTHER)
    result = read_evidence(store, IMAGE, PLATFORM, OTHER)
    assert result
    assert [e.gate for e in result.results] == ["arch"]


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', "[]"])
def test_a_damaged_or_older_file_is_an_error_and_is_replaced(store: Store, text: str) -> None:
    keep(store, evidence("smem"))
    evidence_path(store, IMAGE, PLATFORM).write_text(text)
    with pytest.raises(StoreDamaged, match="cannot be read"):
        read_evidence(store, IMAGE, PLATFORM, DIGEST)
    keep(store, evidence("arch"))
    assert read_evidence(store, IMAGE, PLATFORM, DIGEST)


def test_the_same_findings_give_the_same_bytes_whenever_they_were_made(store: Store) -> None:
    keep(store, evidence("smem"))
    path = evidence_path(store, IMAGE, PLATFORM)
    first = path.read_bytes()
    keep(store, evidence("smem"))
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("gate", "verdict", "kind"),
    [
        ("smem", "failed", GateFailed),
        ("numerics", "failed", GateWrong),
        ("patches", "failed", PatchUnproved),
        ("arch", "failed", NoKernelImage),
        ("smem", "unknown", GateUnknown),
        ("numerics", "unknown", GateUnknown),
        ("patches", "unknown", GateUnknown),
        ("arch", "unknown", GateUnknown),
    ],
)
def test_each_gate_has_its_own_ending(
    gate: GateKind, verdict: GateVerdict, kind: type[PipelineError]
) -> None:
    error = gate_error(IMAGE, evidence(gate, verdict))
    assert type(error) is kind
    assert "case-1: the kernel needs 106496 bytes" in str(error)


def test_an_error_counts_what_fails_and_names_the_first() -> None:
    one = evidence("numerics", "failed")
    rows = [*one.rows, one.rows[0].model_copy(update={"name": "case-2"})]
    rows.append(EvidenceRow(name="case-3", verdict="passed"))
    several = one.model_copy(update={"rows": rows})
    why = "case-1: the kernel needs 106496 bytes"
    assert str(gate_error(IMAGE, one)) == f"engine: 1 case computes wrong numbers on sm_120: {why}"
    assert str(gate_error(IMAGE, several)).endswith(
        f"2 cases compute wrong numbers on sm_120: {why} …"
    )


def test_a_gate_that_judged_nothing_is_an_error() -> None:
    nothing = Evidence(gate="numerics", arch="sm_120", verdict="unknown", inputs={}, made_by={})
    assert isinstance(error := gate_error(IMAGE, nothing), GateUnknown)
    assert "nothing was judged" in str(error)


def test_passed_and_accepted_let_a_build_go_on() -> None:
    assert gate_error(IMAGE, evidence(verdict="passed")) is None
    assert gate_error(IMAGE, evidence(verdict="accepted")) is None


def test_a_gate_that_could_not_begin_is_unknown_and_says_why() -> None:
    update = {"message": "no Triton in it", "rows": []}
    result = evidence(verdict="unknown").model_copy(update=update)
    assert "no Triton in it" in str(gate_error(IMAGE, result))


def test_nothing_at_all_is_unknown() -> None:
    gates = ImageGates(image=IMAGE, platform=PLATFORM, image_digest=DIGEST, results=[])
    assert gates.verdict == "unknown"


def test_the_assembler_is_asked_for_its_version(tmp_path: Path) -> None:
    (tmp_path / "ptxas").write_text("#!/bin/sh\necho 'release 12.8, V12.8.93'\n")
    (tmp_path / "ptxas-mute").write_text("#!/bin/sh\nexit 1\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    assert ptxas_version(tmp_path / "ptxas") == "12.8.93"
    assert ptxas_version(tmp_path / "ptxas-mute") == "unknown"
    assert "unknown (" in ptxas_version(tmp_path / "none")
