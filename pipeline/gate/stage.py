"""One function for each gate, and all that an image asks for as a stage of its build.

Every gate gives a `GateRun`: the evidence that is kept, the seconds, and what there is to show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from pipeline.assemble.image import Built
from pipeline.errors import Interrupted, PipelineError
from pipeline.gate.arch import ArchReport, judge_image, promised_code, read_arch_spec, read_image
from pipeline.gate.evidence import Evidence, GateKind, ImageGates, error_of, keep_evidence
from pipeline.gate.findings import (
    arch_evidence,
    numerics_evidence,
    patch_evidence,
    smem_evidence,
    unjudged,
)
from pipeline.gate.numerics import add_numbers, numeric_cases
from pipeline.gate.patches import judge_patches
from pipeline.gate.smem.context import GateContext
from pipeline.gate.smem.image_gate import ImageGate, open_gate, run_gate
from pipeline.gate.smem.limits import Card, card_for
from pipeline.gate.smem.results import GateResult


@dataclass(frozen=True)
class GateRun:
    """One gate's verdict on an image for one card."""

    evidence: Evidence
    seconds: float
    result: GateResult | None = None  # of smem; after numerics, with the numbers
    report: ArchReport | None = None  # of arch


def run_smem(
    gate: ImageGate, card: Card, *, unpatched: bool = False, only: str | None = None
) -> GateRun:
    """Do the kernels fit the card's shared memory?"""
    result = run_gate(gate, card, unpatched=unpatched, only=only)
    return GateRun(smem_evidence(gate, result), result.seconds, result=result)


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
    result = add_numbers(gate, smem, unpatched=unpatched, only=only)
    assert result.numerics is not None
    return GateRun(numerics_evidence(gate, result), result.numerics.seconds, result=result)


def run_patches(gate: ImageGate, card: Card) -> GateRun:
    """Is each patch needed, and enough?"""
    start = time.monotonic()
    evidence = patch_evidence(gate, card, judge_patches(gate, card))
    return GateRun(evidence, time.monotonic() - start)


def run_arch(context: GateContext, built: Built, archs: Sequence[str]) -> list[GateRun]:
    """Does every object of a built image hold code that the cards can run?"""
    start = time.monotonic()
    checkout, promised = context.checkout, built.plan.spec.promised_archs
    spec = read_arch_spec(checkout, built.name, built.platform)
    objects = read_image(context.store, built)
    compiled = promised_code(built)
    reports = [
        judge_image(objects, spec, arch, promised=arch in promised, compiled=compiled)
        for arch in archs
    ]
    # the objects are read once for all cards: each has its share of the time
    share = (time.monotonic() - start) / max(1, len(reports))
    kept = [arch_evidence(checkout, built.name, built.platform, r) for r in reports]
    return [GateRun(one, share, report=r) for one, r in zip(kept, reports, strict=True)]


@dataclass(frozen=True)
class Staged:
    """The results of one image's gates, and the error that a build with it ends with."""

    gates: ImageGates
    seconds: dict[str, float]  # of this run's gates, by gate and card
    smem: GateResult | None
    error: PipelineError | None


def judge_built(context: GateContext, built: Built) -> Staged | None:
    """Run an image's gates and keep their evidence; none where it asks for none.

    After a gate that fails or cannot begin, the next one still runs.
    """
    runs: list[GateRun] = []
    errors: list[PipelineError | None] = []
    for kind, judge in _stage(context, built, runs):
        start = time.monotonic()
        try:
            new = judge()
            errors += [error_of(built.name, run.evidence) for run in new]
        # an error like others, but no verdict
        except Interrupted:
            raise
        except PipelineError as error:
            unknown = unjudged(kind, built.plan.spec.main_arch, error)
            new = [GateRun(unknown, time.monotonic() - start)]
            errors.append(error)
        runs += new
    if not runs:
        return None
    evidence = [run.evidence for run in runs]
    kept = keep_evidence(context.store, built.name, built.platform, built.digest, evidence)
    seconds = {f"{run.evidence.gate} {run.evidence.arch}": run.seconds for run in runs}
    return Staged(kept, seconds, shown_result(runs), next(filter(None, errors), None))


def shown_result(runs: Sequence[GateRun]) -> GateResult | None:
    """What the last gate that ran kernels leaves to show."""
    return next((run.result for run in reversed(runs) if run.result), None)


def _stage(
    context: GateContext, built: Built, runs: Sequence[GateRun]
) -> Iterator[tuple[GateKind, Callable[[], list[GateRun]]]]:
    """The gates that an image asks for, in order; `runs` are those that have ended by then."""
    opened = cache(lambda: open_gate(context, built.plan))
    # an image without kernels may be for a card whose limits nobody wrote down
    card, gates = cache(lambda: card_for(built.plan.spec.main_arch)), built.plan.spec.gates

    def numerics() -> list[GateRun]:
        smem = runs[0]  # without its result there is nothing to put numbers to
        wanted = smem.result and numeric_cases(opened())
        return [run_numerics(opened(), card(), smem.result)] if wanted else []

    if "smem" in gates:
        yield "smem", lambda: [run_smem(opened(), card())]
        yield "numerics", numerics
        yield "patches", lambda: [run_patches(opened(), card())] if opened().series.patches else []
    if "arch" in gates:
        yield "arch", lambda: run_arch(context, built, built.plan.spec.promised_archs)
