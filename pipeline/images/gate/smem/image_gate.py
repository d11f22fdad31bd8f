"""The shared-memory gate of an image: from its lock, patches and cases to a result.

`tune` tries other block sizes, warps and stages for one case's kernel, and ranks how well they fit.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipeline.core.errors import GateInvalid, GateUnknown, there_are
from pipeline.core.model import Frozen
from pipeline.images.assemble.plan import GATE_WORKER, ImagePlan, program_digest
from pipeline.images.gate.smem.cases import Gates, KernelCase, Override, read_gates
from pipeline.images.gate.smem.coverage import coverage, engine_kernels
from pipeline.images.gate.smem.engine import (
    EngineTree,
    GateContext,
    engine_pin,
    engine_tree,
    patched,
)
from pipeline.images.gate.smem.environment import Environment, make_environment
from pipeline.images.gate.smem.limits import Card
from pipeline.images.gate.smem.results import CaseResult, GateResult, overall_of_cases
from pipeline.images.gate.smem.run import GateTarget, answered, judge_cases
from pipeline.images.spec.image import PatchSeries

# Launch parameters that shape a tile; `tl.dot` needs at least 16 of each.
SWEPT = ("BLOCK_M", "BLOCK_N", "BLOCK_H", "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
SIZES = (16, 32, 64, 128)
# Tiles much larger than anyone chose never fit, and take ptxas minutes to give up on.
LARGER = 2
_LIST = "`sm120 gate find '*' --image IMAGE` lists all cases."


Cases = TypeVar("Cases")


@dataclass(frozen=True)
class OpenedGate(Generic[Cases]):
    """An image made ready for judging: its cases, its environment, its engine."""

    context: GateContext
    plan: ImagePlan
    gates: Cases
    environment: Environment
    tree: EngineTree  # as published
    series: PatchSeries
    is_own: bool = True  # the series that the image is built with

    @property
    def judged(self) -> ImagePlan:
        """The image that results are about."""
        return self.plan

    @property
    def patch_folder(self) -> Path:
        spec = self.plan.spec
        return (self.context.checkout.folder(spec.name) / (spec.patches or "none")).parent

    def patched(self, series: PatchSeries | None = None) -> EngineTree:
        """The engine as the image holds it, or would with another series."""
        chosen = series or self.series
        return patched(self.tree, chosen.patches, self.patch_folder, self.context)

    def about(
        self, tree: EngineTree, *, unpatched: bool, only: str | None, is_whole: bool = True
    ) -> dict[str, Any]:
        """What a result says of image and engine, whichever gate it is of.

        A result of only some of the cases, or of other patches, is not the image's own.
        """
        plan = self.judged
        record = self.context.store.image_record(plan.spec.name, plan.platform)
        is_own = is_whole and self.is_own and not unpatched and only is None
        # a record with another key is of other bytes, which were not judged here
        digest = record.digest if record and record.key == plan.key and is_own else None
        return {
            "image": plan.spec.name,
            "platform": plan.platform,
            "image_digest": digest,
            "engine": tree.project,
            "engine_version": tree.version,
            "engine_digest": tree.digest,
            "patches": [] if unpatched else [spec.file for spec in self.series.patches],
            "environment": self.environment.facts,
        }


class ImageGate(OpenedGate[Gates]):
    """An image made ready for judging its kernels."""

    def target(self, tree: EngineTree, card: Card) -> GateTarget:
        about = (self.context.store, self.environment, tree, self.gates.setup, card)
        return GateTarget(*about, ask=self.context.ask)

    def judge(self, tree: EngineTree, card: Card, cases: Sequence[KernelCase]) -> list[CaseResult]:
        """Judges every case on one tree."""
        return judge_cases(self.target(tree, card), self.gates, cases)


def chosen_series(context: GateContext, plan: ImagePlan, name: str | None) -> PatchSeries:
    """The image's own patches, or the series of `patches/NAME.yaml`."""
    if name is None:
        return context.checkout.series(plan.spec)
    others = context.checkout.other_series(plan.spec)
    if name not in others:
        known = ", ".join(others) or "none"
        raise GateInvalid(
            f"{plan.spec.name}: has no patch series {name!r} (it has: {known})",
            "Choose one of those." if others else "Leave --series out.",
        )
    return others[name]


def open_gate(context: GateContext, plan: ImagePlan, series: str | None = None) -> ImageGate:
    """Reads an image's gates and makes what they need; `series` names another than its own."""
    gates = read_gates(context.checkout, plan.spec.name)
    chosen = chosen_series(context, plan, series)
    environment = make_environment(context, plan, gates.setup.wheels)
    tree = engine_tree(context, plan, engine_pin(context, plan, gates.setup.package, None))
    return ImageGate(context, plan, gates, environment, tree, chosen, is_own=series is None)


def run_gate(
    gate: ImageGate,
    card: Card,
    *,
    unpatched: bool = False,
    only: str | None = None,
    judged: bool = True,
) -> GateResult:
    """Judges an image's cases for a card; with `judged=False` none, for another gate's use."""
    start = time.monotonic()
    tree = gate.tree if unpatched else gate.patched()
    chosen = chosen_cases(gate.gates.cases(), only) if judged else []
    cases = gate.judge(tree, card, chosen)
    seconds = round(time.monotonic() - start, 3)
    covered = None
    # of some cases alone, what the others reach would count as missed
    if judged and not only:
        seen = {(k.record.module, k.record.kernel) for case in cases for k in case.kernels}
        covered = coverage(engine_kernels(gate.context.store, tree), seen)
    return GateResult(
        **gate.about(tree, unpatched=unpatched, only=only),
        card=card,
        worker=program_digest(GATE_WORKER),
        verdict=overall_of_cases(cases),
        cases=cases,
        coverage=covered,
        sandbox=gate.target(tree, card).sandbox,
        seconds=seconds,
    )


def chosen_cases(cases: Sequence[KernelCase], only: str | None) -> list[KernelCase]:
    """All cases, or those whose name fits a pattern such as `extend-*`."""
    chosen = [case for case in cases if only is None or fnmatchcase(case.name, only)]
    if only is not None and not chosen:
        known = there_are(only, [case.name for case in cases])
        raise GateInvalid(
            f"{only}: matches no case ({known})", f"Name one, or a pattern such as 'a-*'. {_LIST}"
        )
    return chosen


def find_case(gates: Gates, name: str) -> KernelCase:
    """One case by its name."""
    cases = {case.name: case for case in gates.cases()}
    if name not in cases:
        raise GateInvalid(f"{name}: there is no such case ({there_are(name, cases)})", _LIST)
    return cases[name]


class Choice(Frozen):
    """One configuration, and what it costs."""

    values: dict[str, int]
    fits: bool
    shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    tile: int
    blocks_per_sm: int | None = None
    who: list[str] = []  # whose choice it is: upstream's, the patched engine's
    message: str = ""

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Fits, then spills little, then works on much at once, then uses few registers."""
        # what ptxas did not report ranks after everything that it did
        spills = 1 << 30 if self.spill_bytes is None else self.spill_bytes
        return (not self.fits, spills, -self.tile, self.registers or 0)


class CaseTuning(Frozen):
    """All configurations of one kernel in one case, best first."""

    case: str
    kernel: str
    limit_bytes: int
    choices: list[Choice]


def sweep_launches(
    gate: ImageGate, card: Card, case: KernelCase, warps: Sequence[int], stages: Sequence[int]
) -> CaseTuning:
    """Sweeps what the kernel is launched with, under the engine as the image holds it."""
    # patches that others published for the same kernel are worth comparing with
    others = gate.context.checkout.other_series(gate.plan.spec)
    trees = {"image": gate.patched(), "upstream": gate.tree}
    trees |= {name: gate.patched(series) for name, series in others.items()}
    records = {}
    for name, tree in trees.items():
        (result,) = gate.judge(tree, card, [case])
        if result.worst is None:
            raise GateUnknown(f"{result.name}: {result.message}")
        records[name] = result.worst.record
    kernel = records["image"].kernel
    names = [name for name in records["image"].blocks if name in SWEPT]
    known = {}
    for name, record in records.items():
        blocks = {block: record.blocks[block] for block in names if block in record.blocks}
        launch = {"num_warps": record.num_warps or 0, "num_stages": record.num_stages or 0}
        known[name] = {**blocks, **launch}
    largest = LARGER * max(map(_tile, known.values()))
    variants = []
    for sizes in itertools.product(*([SIZES] * len(names)), warps, stages):
        values = dict(zip([*names, "num_warps", "num_stages"], sizes, strict=True))
        if _tile(values) > largest:
            continue
        name, override = "-".join(map(str, sizes)), Override(kernel=kernel, values=values)
        variants.append(
            case.model_copy(update={"name": f"{case.name}@{name}", "override": override})
        )
    answers = answered(gate.target(trees["image"], card), variants)
    choices = []
    for variant, answer, _ in answers:
        assert variant.override is not None
        values = variant.override.values
        choice = Choice(
            values=values,
            fits=False,
            tile=_tile(values),
            who=[name for name, chosen in known.items() if chosen == values],
        )
        compiled = next((r for r in answer.records if r.kernel == kernel), None)
        if compiled is None or compiled.shared_bytes is None:
            message = (compiled.error if compiled else None) or answer.message or answer.ended
            choices.append(choice.model_copy(update={"message": message[:120]}))
            continue
        threads = 32 * (compiled.num_warps or 4)
        # the driver takes a kilobyte for each block, and hands out registers in eights
        by_shared = card.shared_bytes_per_sm // (compiled.shared_bytes + 1024)
        registers = -(-(compiled.registers or 1) // 8) * 8
        by_registers = card.registers_per_sm // (threads * registers)
        cost = compiled.model_dump(include={"shared_bytes", "registers", "spill_bytes"})
        blocks_per_sm = min(by_shared, by_registers, card.threads_per_sm // threads)
        fits = compiled.shared_bytes <= card.shared_bytes
        choices.append(
            choice.model_copy(update={**cost, "fits": fits, "blocks_per_sm": blocks_per_sm})
        )
    choices.sort(key=lambda choice: choice.rank)
    return CaseTuning(case=case.name, kernel=kernel, limit_bytes=card.shared_bytes, choices=choices)


def _tile(values: dict[str, int]) -> int:
    """How many results a block works on at once."""
    sides = ("BLOCK_M", "BLOCK_N", "BLOCK_H", "BLOCK_SIZE_M", "BLOCK_SIZE_N")
    return math.prod(value for name, value in values.items() if name in sides)
