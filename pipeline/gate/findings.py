"""Each gate's findings in the common form that is kept beside an image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pipeline import __version__
from pipeline.errors import PipelineError
from pipeline.gate.arch import ArchReport, JudgedObject, ObjectVerdict, reader_digest
from pipeline.gate.evidence import Evidence, EvidenceRow, GateKind
from pipeline.gate.files import gate_files
from pipeline.gate.patches import PatchVerdict
from pipeline.gate.smem.environment import Environment
from pipeline.gate.smem.image_gate import ImageGate
from pipeline.gate.smem.limits import CARDS, Card
from pipeline.gate.smem.results import CaseResult, GateResult
from pipeline.gate.smem.run import worker_digest
from pipeline.gate.verdict import CaseVerdict, worst
from pipeline.model import canonical_json, sha256_of
from pipeline.sandbox.sandbox import find_sandbox
from pipeline.spec.checkout import Checkout

# Left out of evidence: the same findings must give the same bytes, whenever they are made.
_TIMES = {"seconds", "cached"}
# Up to so many objects that one line of arch.yaml accepts are listed one by one.
_FEW = 8
# What a patch's state means for a build that holds it; every other state is a failure.
_STATES: dict[str, CaseVerdict] = {
    **{"needed": "passed", "unknown": "unknown"},
    # the reason stands in series.yaml, as that of a kernel which may stay over the limit does
    "no gate": "accepted",
}


def smem_evidence(gate: ImageGate, result: GateResult) -> Evidence:
    """The shared-memory gate's result."""
    covered = result.coverage
    return Evidence(
        gate="smem",
        arch=result.card.arch,
        verdict=result.verdict,
        inputs={**_inputs(gate, "smem"), "engine": result.engine_digest},
        made_by=_compilers(gate.environment),
        card=result.card,
        summary={
            "engine": f"{result.engine} {result.engine_version}",
            "environment": result.environment.kind,
            "stub libraries": result.environment.stubs,
            "coverage": covered.model_dump(mode="json") if covered else None,
        },
        rows=[_case_row(case) for case in result.cases],
    )


def numerics_evidence(gate: ImageGate, result: GateResult) -> Evidence:
    """What the kernels compute, beside float64."""
    numerics = result.numerics
    assert numerics is not None
    verdicts: dict[str, CaseVerdict] = {"right": "passed", "wrong": "failed"}
    return Evidence(
        gate="numerics",
        arch=result.card.arch,
        verdict=verdicts.get(numerics.verdict, "unknown"),
        inputs={**_inputs(gate, "numerics"), "engine": result.engine_digest},
        made_by={**_compilers(gate.environment), **numerics.versions},
        card=result.card,
        summary={
            "by": "Triton's interpreter on the CPU",
            "repairs": numerics.repairs,
            "passed without a number check": len(result.without_numbers) if result.cases else None,
        },
        rows=[
            EvidenceRow(
                name=case.name,
                verdict=verdicts.get(case.verdict, "unknown"),
                message=case.message,
                facts=case.model_dump(mode="json", exclude={"name", "verdict", "message", *_TIMES}),
            )
            for case in numerics.cases
        ],
    )


def _case_row(case: CaseResult) -> EvidenceRow:
    facts = case.model_dump(mode="json", exclude={"name", "verdict", "message", *_TIMES})
    for kernel in facts["kernels"]:
        kernel["record"].pop("seconds", None)
    return EvidenceRow(name=case.name, verdict=case.verdict, message=case.message, facts=facts)


def patch_evidence(gate: ImageGate, card: Card, verdicts: Sequence[PatchVerdict]) -> Evidence:
    """The patches' verdicts at the locked version; a patch passes when it is needed."""
    rows = [
        EvidenceRow(
            name=v.patch,
            verdict=_STATES.get(v.state, "failed"),
            message=f"{v.state}: {v.message}",
            facts=v.model_dump(mode="json", exclude={"patch", "message"}),
        )
        for v in verdicts
    ]
    return Evidence(
        gate="patches",
        arch=card.arch,
        verdict=worst([row.verdict for row in rows]),
        # as published: every patch is judged on trees of its own, made from this one
        inputs={**_inputs(gate, "patches"), "engine": gate.tree.digest},
        made_by=_compilers(gate.environment),
        card=card,
        rows=rows,
    )


def arch_evidence(checkout: Checkout, image: str, platform: str, report: ArchReport) -> Evidence:
    """The architecture gate's result: a row for every object that carries CUDA code.

    Where one line of arch.yaml accepts many (thousands of files of kernels for other cards), they
    are one row with the digest of their names and hashes.
    """
    # the others are the same for every card, and most of an image: the summary counts them
    carrying = [x for x in report.objects if x.judgement.verdict is not ObjectVerdict.NO_CUDA_CODE]
    groups: dict[str, list[JudgedObject]] = {}
    for judged in carrying:
        groups.setdefault(judged.accepted or judged.path, []).append(judged)
    rows = [row for name, group in groups.items() for row in _object_rows(name, group)]
    rows += [
        EvidenceRow(name=glob, verdict="failed", message="demanded, but no object matches")
        for glob in report.unmatched
    ]
    return Evidence(
        gate="arch",
        arch=report.arch,
        # an image without any CUDA code is fit for every card
        verdict=worst([row.verdict for row in rows] or ["passed"]),
        inputs=_gate_files(checkout, image, "arch", platform),
        made_by={"sm120-pipeline": __version__, "reader": reader_digest()},
        summary={**report.summary, "accepted without need": list(report.unused)},
        rows=rows,
    )


def _object_rows(name: str, group: Sequence[JudgedObject]) -> list[EvidenceRow]:
    if len(group) <= _FEW:
        return [_object_row(judged) for judged in group]
    listed = canonical_json([[x.path, x.sha256] for x in group])
    code = sorted({str(target) for x in group for target in x.facts.targets})
    facts = {"objects": len(group), "objects_digest": sha256_of(listed), "code": code}
    message = ", ".join(sorted({x.judgement.message for x in group}))
    return [EvidenceRow(name=name, verdict="accepted", message=message, facts=facts)]


def _object_row(judged: JudgedObject) -> EvidenceRow:
    judgement = judged.judgement
    forgiven: CaseVerdict = "accepted" if judged.accepted else "passed"
    return EvidenceRow(
        name=judged.path,
        verdict="failed" if judged.failed else forgiven,
        message=judgement.message,
        facts={
            "sha256": judged.sha256,
            "code": sorted(map(str, judged.facts.targets)),
            "modules": judgement.counts,
            "accepted_by": judged.accepted,
        },
    )


def unjudged(gate: GateKind, arch: str, error: PipelineError) -> Evidence:
    """A gate that could not even begin: unknown, and why."""
    return Evidence(
        gate=gate,
        arch=arch,
        verdict="unknown",
        message=str(error),
        inputs={},
        made_by={"sm120-pipeline": __version__},
        card=CARDS.get(arch),
    )


def _gate_files(checkout: Checkout, image: str, gate: GateKind, platform: str) -> dict[str, str]:
    files = gate_files(checkout, image, gate, platform)
    return {name: sha256_of(path.read_bytes()) for name, path in files.items()}


def _inputs(gate: ImageGate, kind: GateKind) -> dict[str, str]:
    """Files that decide what is compiled, beyond the engine's own."""
    patches = [gate.patch_folder / spec.file for spec in gate.series.patches]
    wheels = gate.environment.facts.wheels
    return {
        **_gate_files(gate.context.checkout, gate.plan.spec.name, kind, gate.plan.platform),
        **{f"patches/{p.name}": sha256_of(p.read_bytes()) for p in patches},
        **{pin.file: f"sha256:{pin.sha256}" for pin in wheels},
    }


def _compilers(environment: Environment) -> dict[str, str]:
    facts = environment.facts
    return {
        "sm120-pipeline": __version__,
        "worker": worker_digest(),
        "python": facts.python,
        "torch": facts.torch,
        "triton": facts.triton,
        **ptxas_versions(environment.folder / "site"),
    }


@cache
def ptxas_version(program: Path) -> str:
    """`12.8.93`, as the program prints it, or why that is not known."""
    try:
        program.stat()
        # it comes out of a wheel, like all that runs inside
        done = find_sandbox().run([str(program), "--version"], read=[program])
    except OSError as error:
        return f"unknown ({error.strerror})"
    match = re.search(r"\bV(\d[\w.]*)", done.stdout.decode(errors="replace"))
    return match[1] if match else "unknown"


def ptxas_versions(site: Path) -> dict[str, str]:
    """Every assembler that an environment's Triton brings; which it takes depends on the card."""
    folder = site / "triton" / "backends" / "nvidia" / "bin"
    return {p.name: ptxas_version(p) for p in sorted(folder.glob("ptxas*"))}
