"""One function for each gate, and all that an image asks for as a stage of its build.

Every gate gives a `GateRun`: the evidence that is kept, the seconds, and what there is to show. The
same findings must give the same bytes, whenever they are made, so evidence holds no times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.artifacts.containers.sandbox import find_sandbox
from pipeline.core.errors import Interrupted, PipelineError
from pipeline.core.model import canonical_json, sha256_of
from pipeline.core.verdict import GateVerdict, worst
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.plan import GATE_WORKER, program_digest
from pipeline.images.gate import arch
from pipeline.images.gate.evidence import (
    Evidence,
    EvidenceRow,
    GateKind,
    ImageGates,
    gate_error,
    keep_evidence,
)
from pipeline.images.gate.files import gate_files
from pipeline.images.gate.numerics import check_numbers, numeric_cases
from pipeline.images.gate.parsers.judge import (
    ParserGate,
    ParserResults,
    open_parser_gate,
    run_parser_gate,
)
from pipeline.images.gate.patches import ChatOrKernel, judge_patches
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.gate.smem.image_gate import (
    ImageGate,
    OpenedGate,
    chosen_cases,
    open_gate,
    run_gate,
)
from pipeline.images.gate.smem.limits import CARDS, Card, card_for
from pipeline.images.gate.smem.results import GateResult, NumericsResult
from pipeline.images.gate.templates.judge import (
    TemplateGate,
    TemplateResults,
    open_template_gate,
    run_template_gate,
)
from pipeline.images.spec.checkout import Checkout

# A row states these itself, or they are times.
_NO_FACTS: dict[str, Any] = {
    **dict.fromkeys(("name", "verdict", "message", "seconds", "cached", "family"), True),
    "kernels": {"__all__": {"record": {"seconds"}}},
}
# Up to so many objects that one line of arch.yaml accepts are listed one by one.
_FEW = 8
# What a patch's state means for a build that holds it; every other state is a failure.
_STATES: dict[str, GateVerdict] = {
    "needed": "passed",
    "unknown": "unknown",
    # series.yaml has the reason, as case files have that of a kernel over the limit
    "no gate": "accepted",
}


@dataclass(frozen=True)
class GateRun:
    """One gate's verdict on an image for one card."""

    evidence: Evidence
    seconds: float
    result: GateResult | None = None  # of smem; after numerics, with the numbers
    report: arch.ArchReport | None = None  # of arch
    parsers: ParserResults | None = None  # of parsers
    templates: TemplateResults | None = None  # of templates


def run_smem(
    gate: ImageGate, card: Card, *, unpatched: bool = False, only: str | None = None
) -> GateRun:
    """Do the kernels fit the card's shared memory?"""
    result = run_gate(gate, card, unpatched=unpatched, only=only)
    covered = result.coverage
    evidence = Evidence(
        **_about(gate, "smem", card, result.engine_digest),
        verdict=result.verdict,
        summary={
            "engine": f"{result.engine} {result.engine_version}",
            "environment": result.environment.kind,
            "stub libraries": result.environment.stubs,
            "coverage": covered.model_dump(mode="json") if covered else None,
        },
        rows=[_row(case, case.verdict) for case in result.cases],
    )
    return GateRun(evidence, result.seconds, result=result)


def _row(case: ChatOrKernel | NumericsResult, verdict: GateVerdict) -> EvidenceRow:
    facts = case.model_dump(mode="json", exclude=_NO_FACTS)
    return EvidenceRow(name=case.name, verdict=verdict, message=case.message, facts=facts)


def run_numerics(
    gate: ImageGate,
    card: Card,
    smem: GateResult | None,
    *,
    unpatched: bool = False,
    only: str | None = None,
) -> GateRun:
    """Do the kernels compute the right thing? No case needs to be judged by smem first."""
    smem = smem or run_gate(gate, card, unpatched=unpatched, only=only, judged=False)
    target = gate.target(gate.tree if unpatched else gate.patched(), card)
    numerics = check_numbers(target, chosen_cases(numeric_cases(gate), only))
    result = smem.model_copy(update={"numerics": numerics})
    verdicts: dict[str, GateVerdict] = {"right": "passed", "wrong": "failed"}
    about = _about(gate, "numerics", card, result.engine_digest)
    about["made_by"] |= numerics.versions
    evidence = Evidence(
        **about,
        verdict=verdicts.get(numerics.verdict, "unknown"),
        summary={
            "by": "Triton's interpreter on the CPU",
            "repairs": numerics.repairs,
            "passed without a number check": len(result.without_numbers) if result.cases else None,
        },
        rows=[_row(case, verdicts.get(case.verdict, "unknown")) for case in numerics.cases],
    )
    return GateRun(evidence, numerics.seconds, result=result)


def run_patches(gate: ImageGate, card: Card) -> GateRun:
    """Is each patch needed, and enough, at the locked version?"""
    start = time.monotonic()
    rows = [
        EvidenceRow(
            name=v.patch,
            verdict=_STATES.get(v.state, "failed"),
            message=f"{v.state}: {v.message}",
            facts=v.model_dump(mode="json", exclude={"patch", "message"}),
        )
        for v in judge_patches(gate, card)
    ]
    # as published: every patch is judged on trees of its own, made from this one
    about = _about(gate, "patches", card, gate.tree.digest)
    evidence = Evidence(**about, verdict=worst([row.verdict for row in rows], "unknown"), rows=rows)
    return GateRun(evidence, time.monotonic() - start)


def run_parsers(
    gate: ParserGate, arch: str, *, unpatched: bool = False, only: str | None = None
) -> GateRun:
    """Does a client get what models mean, however their answers are cut?"""
    result = run_parser_gate(gate, unpatched=unpatched, only=only)
    summary = {"streams": sum(case.streams for case in result.cases)}
    evidence = _chat_evidence("parsers", arch, gate, result, summary)
    return GateRun(evidence, result.seconds, parsers=result)


def run_templates(
    gate: TemplateGate, arch: str, *, unpatched: bool = False, only: str | None = None
) -> GateRun:
    """Does the engine write what the model's own template writes?"""
    result = run_template_gate(gate, unpatched=unpatched, only=only)
    summary = {"templates": result.templates}
    evidence = _chat_evidence("templates", arch, gate.opened, result, summary)
    return GateRun(evidence, result.seconds, templates=result)


def _chat_evidence(
    kind: GateKind,
    arch: str,
    gate: OpenedGate[Any],
    result: ParserResults | TemplateResults,
    summary: dict[str, Any],
) -> Evidence:
    """Evidence of a gate that drives the chat endpoint.

    No card decides it; results of an image are kept by card, so it has the image's first.
    """
    facts = result.environment
    return Evidence(
        gate=kind,
        arch=arch,
        verdict=result.verdict,
        inputs=_inputs(gate, kind, result.patches, result.engine_digest),
        made_by=_made_by(result.worker, python=facts.python),
        summary={
            "engine": f"{result.engine} {result.engine_version}",
            "environment": facts.kind,
            **summary,
            "not judged": result.not_judged,
        },
        rows=[_row(case, case.verdict) for case in result.cases],
    )


def run_arch(context: GateContext, built: Built, archs: Sequence[str]) -> list[GateRun]:
    """Does every object of a built image hold code that the cards can run?"""
    start = time.monotonic()
    promised = built.plan.spec.promised_archs
    spec = arch.read_arch_spec(context.checkout, built.name, built.platform)
    objects, compiled = arch.read_image(context.store, built), arch.promised_code(built)
    reports = [
        arch.judge_image(objects, spec, each, promised=each in promised, compiled=compiled)
        for each in archs
    ]
    # the objects are read once for all cards: each has its share of the time
    share = (time.monotonic() - start) / max(1, len(reports))
    inputs = _gate_files(context.checkout, built.name, "arch", built.platform)
    return [GateRun(_arch_evidence(r, inputs), share, report=r) for r in reports]


def _arch_evidence(report: arch.ArchReport, inputs: dict[str, str]) -> Evidence:
    """Makes a row for every object that carries CUDA code.

    Where one line of arch.yaml accepts many (thousands of files of kernels for other cards), they
    are one row with the digest of their names and hashes.
    """
    groups: dict[str, list[arch.JudgedObject]] = {}
    for judged in report.objects:
        # the others are the same for every card, and most of an image: the summary counts them
        if judged.judgement.verdict is not arch.ObjectVerdict.NO_CUDA_CODE:
            groups.setdefault(judged.accepted or judged.path, []).append(judged)
    rows = []
    for name, group in groups.items():
        if len(group) > _FEW:
            listed = canonical_json([[x.path, x.sha256] for x in group])
            code = sorted({str(target) for x in group for target in x.facts.targets})
            facts = {"objects": len(group), "objects_digest": sha256_of(listed), "code": code}
            message = ", ".join(sorted({x.judgement.message for x in group}))
            rows.append(EvidenceRow(name=name, verdict="accepted", message=message, facts=facts))
            continue
        for x in group:
            good: GateVerdict = "accepted" if x.accepted else "passed"
            facts = {
                "sha256": x.sha256,
                "code": sorted(map(str, x.facts.targets)),
                "modules": {
                    "all": x.judgement.modules,
                    "run": x.judgement.running,
                    "jit": x.judgement.jitted,
                },
                "accepted_by": x.accepted,
            }
            verdict: GateVerdict = "failed" if x.failed else good
            message = x.judgement.message
            rows.append(EvidenceRow(name=x.path, verdict=verdict, message=message, facts=facts))
    for glob in report.unmatched:
        message = "demanded, but no object matches"
        rows.append(EvidenceRow(name=glob, verdict="failed", message=message))
    return Evidence(
        gate="arch",
        arch=report.arch,
        # an image without any CUDA code is fit for every card
        verdict=worst([row.verdict for row in rows], "passed"),
        inputs=inputs,
        made_by={"sm120-pipeline": __version__, "reader": arch.reader_digest()},
        summary={**report.summary, "accepted without need": list(report.unused)},
        rows=rows,
    )


def _gate_files(checkout: Checkout, image: str, gate: GateKind, platform: str) -> dict[str, str]:
    files = gate_files(checkout, image, gate, platform)
    return {name: sha256_of(path.read_bytes()) for name, path in files.items()}


def _about(gate: ImageGate, kind: GateKind, card: Card, engine: str) -> dict[str, Any]:
    """What a gate was asked about, and what decided it, for its evidence."""
    facts, patches = gate.environment.facts, [spec.file for spec in gate.series.patches]
    # every assembler that Triton brings; which of them it takes depends on the card
    tools = gate.environment.folder / "site" / "triton" / "backends" / "nvidia" / "bin"
    return {
        "gate": kind,
        "arch": card.arch,
        "card": card,
        "inputs": _inputs(gate, kind, patches, engine),
        "made_by": _made_by(
            program_digest(GATE_WORKER),
            **{"python": facts.python, "torch": facts.torch, "triton": facts.triton},
            **{path.name: ptxas_version(path) for path in sorted(tools.glob("ptxas*"))},
        ),
    }


def _inputs(
    gate: OpenedGate[Any], kind: GateKind, patches: Sequence[str], engine: str
) -> dict[str, str]:
    plan, paths = gate.plan, [gate.patch_folder / file for file in patches]
    return {
        **_gate_files(gate.context.checkout, plan.spec.name, kind, plan.platform),
        **{f"patches/{path.name}": sha256_of(path.read_bytes()) for path in paths},
        **{pin.file: f"sha256:{pin.sha256}" for pin in gate.environment.facts.wheels},
        "engine": engine,
    }


def _made_by(worker: str, **versions: str) -> dict[str, str]:
    return {"sm120-pipeline": __version__, "worker": worker, **versions}


@cache
def ptxas_version(program: Path) -> str:
    """`12.8.93`, as the program prints it, or why that is not known."""
    try:
        program.stat()
        # it comes out of a wheel, so it runs in the sandbox
        done = find_sandbox().run([str(program), "--version"], read=[program])
    except OSError as error:
        return f"unknown ({error.strerror})"
    match = re.search(r"\bV(\d[\w.]*)", done.stdout.decode(errors="replace"))
    return match[1] if match else "unknown"


@dataclass(frozen=True)
class Staged:
    """The results of one image's gates, and the error that a build with it ends with."""

    gates: ImageGates
    seconds: dict[str, float]  # of this run's gates, by gate and card
    smem: GateResult | None
    error: PipelineError | None


def judge_built(context: GateContext, built: Built) -> Staged | None:
    """Runs an image's gates and keeps their evidence; none where it asks for none.

    After a gate that fails or cannot begin, the next one still runs.
    """
    spec = built.plan.spec
    runs: list[GateRun] = []
    errors: list[PipelineError | None] = []
    # made when a gate first asks: an image without kernels may be for a card of unknown limits
    opened = cache(lambda: open_gate(context, built.plan))
    card = cache(lambda: card_for(spec.main_arch))

    def numerics() -> list[GateRun]:
        smem = runs[0]  # without its result there is nothing to put numbers to
        wanted = smem.result and numeric_cases(opened())
        return [run_numerics(opened(), card(), smem.result)] if wanted else []

    stages: dict[GateKind, Callable[[], list[GateRun]]] = {
        "smem": lambda: [run_smem(opened(), card())],
        "numerics": numerics,
        "patches": lambda: [run_patches(opened(), card())] if opened().series.patches else [],
        "parsers": lambda: [run_parsers(open_parser_gate(context, built.plan), spec.main_arch)],
        "templates": lambda: [
            run_templates(open_template_gate(context, built.plan, {}), spec.main_arch)
        ],
        "arch": lambda: run_arch(context, built, spec.promised_archs),
    }
    for kind, judge in stages.items():
        # the gates of kernels are asked for together
        if (kind if kind in ("arch", "parsers", "templates") else "smem") not in spec.gates:
            continue
        start = time.monotonic()
        try:
            new = judge()
            errors += [gate_error(built.name, run.evidence) for run in new]
        # an error like others, but no verdict
        except Interrupted:
            raise
        except PipelineError as error:
            unknown = Evidence(
                gate=kind,
                arch=spec.main_arch,
                verdict="unknown",
                message=str(error),
                inputs={},
                made_by={"sm120-pipeline": __version__},
                card=CARDS.get(spec.main_arch),
            )
            new = [GateRun(unknown, time.monotonic() - start)]
            errors.append(error)
        runs += new
    if not runs:
        return None
    evidence = [run.evidence for run in runs]
    all_evidence = keep_evidence(context.store, built.name, built.platform, built.digest, evidence)
    seconds = {f"{run.evidence.gate} {run.evidence.arch}": run.seconds for run in runs}
    return Staged(all_evidence, seconds, shown_result(runs), next(filter(None, errors), None))


def shown_result(runs: Sequence[GateRun]) -> GateResult | None:
    """The result of the last gate that ran kernels, which commands show."""
    return next((run.result for run in reversed(runs) if run.result), None)
