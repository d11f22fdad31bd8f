"""Gates as a stage of a build: all that an image asks for, whatever the others say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pipeline.assemble.image import Built
from pipeline.assemble.plan import plan_image
from pipeline.errors import Interrupted, PipelineError
from pipeline.gate.arch.report import judge_image, read_image
from pipeline.gate.arch.spec import read_arch_spec
from pipeline.gate.evidence import Evidence, GateKind, ImageGates, ending, keep_evidence
from pipeline.gate.findings import (
    arch_evidence,
    numerics_evidence,
    patch_evidence,
    smem_evidence,
    unjudged,
)
from pipeline.gate.numerics.check import check_numbers
from pipeline.gate.patches import judge_patches
from pipeline.gate.smem.environment import GateContext
from pipeline.gate.smem.image_gate import ImageGate, open_gate, run_gate
from pipeline.gate.smem.limits import card_for
from pipeline.gate.smem.results import GateResult
from pipeline.spec.image import ImageSpec

DEFAULT_ARCH = "sm_120"


@dataclass(frozen=True)
class Staged:
    """What the gates said of one image, and how a build with it ends."""

    gates: ImageGates
    seconds: dict[str, float]  # of this run's gates, by gate and card
    smem: GateResult | None
    error: PipelineError | None


def promised(spec: ImageSpec) -> list[str]:
    """The cards an image is for."""
    return (list(spec.cuda.architectures) if spec.cuda else []) or [DEFAULT_ARCH]


def judge_built(context: GateContext, built: Built) -> Staged | None:
    """Run an image's gates and keep what they say; none where it asks for none."""
    stage = _Stage(context, built)
    if "smem" in stage.spec.gates:
        stage.run("smem", stage.judge_smem)
        stage.run("numerics", stage.judge_numbers)
        stage.run("patches", stage.judge_patches)
    if "arch" in stage.spec.gates:
        stage.run("arch", stage.judge_arch)
    if not stage.found:
        return None
    kept = keep_evidence(context.store, built.name, built.platform, built.digest, stage.found)
    seconds = {f"{e.gate} {e.arch}": s for e, s in stage.found}
    error = stage.errors[0] if stage.errors else None
    return Staged(kept, seconds, stage.smem, error)


class _Stage:
    """One image on its way through its gates; after one that fails, the next still runs."""

    def __init__(self, context: GateContext, built: Built) -> None:
        self.context, self.built = context, built
        self.spec = context.checkout.spec(built.name)
        self.found: list[tuple[Evidence, float]] = []
        self.errors: list[PipelineError] = []
        self.smem: GateResult | None = None

    def run(self, gate: GateKind, judge: Callable[[], list[Evidence]]) -> None:
        start = time.monotonic()
        try:
            evidence = judge()
        except Interrupted:
            raise
        except PipelineError as error:
            evidence = [unjudged(gate, DEFAULT_ARCH, error)]
            self.errors.append(error)
        else:
            ends = [ending(self.built.name, e) for e in evidence]
            self.errors += [error for error in ends if error is not None]
        share = (time.monotonic() - start) / max(1, len(evidence))
        self.found += [(e, share) for e in evidence]

    @cached_property
    def opened(self) -> ImageGate:
        plan = plan_image(self.context.checkout, self.built.name, self.built.platform)
        return open_gate(self.context, plan)

    def judge_smem(self) -> list[Evidence]:
        self.smem = run_gate(self.opened, card_for(DEFAULT_ARCH))
        return [smem_evidence(self.opened, self.smem)]

    def judge_numbers(self) -> list[Evidence]:
        if self.smem is None or not self.opened.numeric:
            return []
        target = self.opened.target(self.opened.patched(), card_for(DEFAULT_ARCH))
        numbers = check_numbers(target, self.opened.numeric)
        self.smem = self.smem.model_copy(update={"numerics": numbers})
        return [numerics_evidence(self.opened, self.smem)]

    def judge_patches(self) -> list[Evidence]:
        if not self.opened.series.patches:
            return []
        card = card_for(DEFAULT_ARCH)
        return [patch_evidence(self.opened, card, judge_patches(self.opened, card))]

    def judge_arch(self) -> list[Evidence]:
        checkout, name = self.context.checkout, self.built.name
        spec, objects = (
            read_arch_spec(checkout, name),
            read_image(self.context.store, self.built),
        )
        reports = [judge_image(objects, spec, arch) for arch in promised(self.spec)]
        return [arch_evidence(checkout, name, report) for report in reports]
