"""One function for each gate, and all that an image asks for as a stage of its build.

Every gate gives a `GateRun`: the evidence that is kept, the seconds, and the detail for people.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from pipeline.assemble.image import Built
from pipeline.errors import Interrupted, PipelineError
from pipeline.gate.arch.report import ArchReport, judge_image, read_image
from pipeline.gate.arch.spec import read_arch_spec
from pipeline.gate.evidence import Evidence, GateKind, ImageGates, error_of, keep_evidence
from pipeline.gate.findings import (
    arch_evidence,
    numerics_evidence,
    patch_evidence,
    smem_evidence,
    unjudged,
)
from pipeline.gate.numerics.check import add_numbers, numeric_cases
from pipeline.gate.patches import PatchVerdict, judge_patches
from pipeline.gate.smem.context import GateContext
from pipeline.gate.smem.image_gate import ImageGate, open_gate, run_gate
from pipeline.gate.smem.limits import Card, card_for
from pipeline.gate.smem.results import GateResult
from pipeline.spec.image import ImageSpec

DEFAULT_ARCH = "sm_120"

Detail = TypeVar("Detail", covariant=True)


@dataclass(frozen=True)
class GateRun(Generic[Detail]):
    """One gate's verdict on an image for one card."""

    evidence: Evidence
    seconds: float
    detail: Detail


def run_smem(gate: ImageGate, card: Card) -> GateRun[GateResult]:
    """Do the kernels fit the card's shared memory?"""
    result = run_gate(gate, card)
    return GateRun(smem_evidence(gate, result), result.seconds, result)


def run_numerics(gate: ImageGate, smem: GateResult) -> GateRun[GateResult]:
    """Do the kernels that the shared-memory gate judged compute the right thing?"""
    result = add_numbers(gate, smem)
    assert result.numerics is not None
    return GateRun(numerics_evidence(gate, result), result.numerics.seconds, result)


def run_patches(gate: ImageGate, card: Card) -> GateRun[list[PatchVerdict]]:
    """Is each patch needed, and enough?"""
    start = time.monotonic()
    verdicts = judge_patches(gate, card)
    evidence = patch_evidence(gate, card, verdicts)
    return GateRun(evidence, time.monotonic() - start, verdicts)


def run_arch(context: GateContext, built: Built, archs: Sequence[str]) -> list[GateRun[ArchReport]]:
    """Does every object of a built image hold code that the cards can run?"""
    start = time.monotonic()
    checkout, promised = context.checkout, promised_archs(context.checkout.spec(built.name))
    spec, objects = read_arch_spec(checkout, built.name), read_image(context.store, built)
    reports = [judge_image(objects, spec, arch, promised=arch in promised) for arch in archs]
    # the objects are read once for all cards: each has its share of the time
    share = (time.monotonic() - start) / max(1, len(reports))
    return [GateRun(arch_evidence(checkout, built.name, r), share, r) for r in reports]


def promised_archs(spec: ImageSpec) -> list[str]:
    """The cards an image is for."""
    return (list(spec.cuda.architectures) if spec.cuda else []) or [DEFAULT_ARCH]


@dataclass(frozen=True)
class Staged:
    """The results of one image's gates, and the error that a build with it ends with."""

    gates: ImageGates
    seconds: dict[str, float]  # of this run's gates, by gate and card
    smem: GateResult | None
    error: PipelineError | None


def judge_built(context: GateContext, built: Built) -> Staged | None:
    """Run an image's gates and keep their evidence; none where it asks for none."""
    stage = _Stage(context, built)
    if "smem" in stage.spec.gates:
        stage.run("smem", stage.smem)
        stage.run("numerics", stage.numerics)
        stage.run("patches", stage.patches)
    if "arch" in stage.spec.gates:
        stage.run("arch", stage.arch)
    if not stage.kept:
        return None
    kept = keep_evidence(context.store, built.name, built.platform, built.digest, stage.kept)
    seconds = {f"{e.gate} {e.arch}": s for e, s in stage.kept}
    error = stage.errors[0] if stage.errors else None
    return Staged(kept, seconds, stage.result, error)


class _Stage:
    """One image on its way through its gates; after one that fails, the next still runs."""

    def __init__(self, context: GateContext, built: Built) -> None:
        self.context, self.built = context, built
        self.spec = built.plan.spec
        self.kept: list[tuple[Evidence, float]] = []
        self.errors: list[PipelineError] = []
        self.result: GateResult | None = None

    def run(self, gate: GateKind, judge: Callable[[], Sequence[GateRun[Any]]]) -> None:
        start = time.monotonic()
        try:
            runs = judge()
        except Interrupted:
            raise
        except PipelineError as error:
            unknown = unjudged(gate, DEFAULT_ARCH, error)
            self.kept.append((unknown, time.monotonic() - start))
            self.errors.append(error)
            return
        self.kept += [(run.evidence, run.seconds) for run in runs]
        ends = [error_of(self.built.name, run.evidence) for run in runs]
        self.errors += [error for error in ends if error is not None]

    @cached_property
    def opened(self) -> ImageGate:
        return open_gate(self.context, self.built.plan)

    def smem(self) -> list[GateRun[GateResult]]:
        run = run_smem(self.opened, card_for(DEFAULT_ARCH))
        self.result = run.detail
        return [run]

    def numerics(self) -> list[GateRun[GateResult]]:
        if self.result is None or not numeric_cases(self.opened):
            return []
        run = run_numerics(self.opened, self.result)
        self.result = run.detail
        return [run]

    def patches(self) -> list[GateRun[list[PatchVerdict]]]:
        if not self.opened.series.patches:
            return []
        return [run_patches(self.opened, card_for(DEFAULT_ARCH))]

    def arch(self) -> list[GateRun[ArchReport]]:
        return run_arch(self.context, self.built, promised_archs(self.spec))
