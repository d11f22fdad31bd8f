"""The shared-memory gate of an image: from its lock, patches and cases to a result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline.assemble.plan import ImagePlan
from pipeline.errors import GateInvalid, there_are
from pipeline.gate.smem.cases import Case, Gates, read_gates
from pipeline.gate.smem.context import GateContext
from pipeline.gate.smem.coverage import coverage, engine_kernels
from pipeline.gate.smem.engine import EngineTree, engine_pin, engine_tree, patched
from pipeline.gate.smem.environment import Environment, make_environment
from pipeline.gate.smem.limits import Card
from pipeline.gate.smem.results import CaseResult, GateResult, overall
from pipeline.gate.smem.run import GateTarget, judge_all, worker_digest
from pipeline.spec.image import PatchSeries

_LIST = "`sm120 gate find '*' --image IMAGE` lists all cases."


@dataclass(frozen=True)
class ImageGate:
    """An image made ready for judging: its gates, its environment, its engine."""

    context: GateContext
    plan: ImagePlan
    gates: Gates
    environment: Environment
    tree: EngineTree  # as published
    series: PatchSeries
    is_own: bool = True  # the series that the image is built with

    @property
    def patch_folder(self) -> Path:
        spec = self.plan.spec
        return (self.context.checkout.folder(spec.name) / (spec.patches or "none")).parent

    def target(self, tree: EngineTree, card: Card) -> GateTarget:
        return GateTarget(self.context.store, self.environment, tree, self.gates.setup, card)

    def judge(self, tree: EngineTree, card: Card, cases: Sequence[Case]) -> list[CaseResult]:
        """Every case's verdict on one tree."""
        return judge_all(self.target(tree, card), self.gates, cases)

    def patched(self, series: PatchSeries | None = None) -> EngineTree:
        """The engine as the image holds it, or would with another series."""
        chosen = series or self.series
        return patched(self.tree, chosen.patches, self.patch_folder, self.context)


def open_gate(context: GateContext, plan: ImagePlan, series: str | None = None) -> ImageGate:
    """Reads an image's gates and makes what they need; `series` names another than its own."""
    gates = read_gates(context.checkout, plan.spec.name)
    chosen = chosen_series(context, plan, series)
    environment = make_environment(context, plan, gates.setup.wheels)
    pin = engine_pin(context, plan, gates.setup.package, None)
    tree = engine_tree(context, plan, pin)
    return ImageGate(context, plan, gates, environment, tree, chosen, is_own=series is None)


def chosen_series(context: GateContext, plan: ImagePlan, name: str | None) -> PatchSeries:
    """The image's own patches, or another series of it by name."""
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


def run_gate(
    gate: ImageGate,
    card: Card,
    *,
    unpatched: bool = False,
    only: str | None = None,
    judged: bool = True,
) -> GateResult:
    """Judges an image's cases for a card; with `judged=False` none, for another gate's use.

    A result of only some of the cases, or of other patches, is not the image's own.
    """
    start = time.monotonic()
    tree = gate.tree if unpatched else gate.patched()
    chosen = chosen_cases(gate.gates.cases(), only) if judged else []
    cases = gate.judge(tree, card, chosen)
    record = gate.context.store.image_record(gate.plan.spec.name, gate.plan.platform)
    is_whole = gate.is_own and not unpatched and only is None
    # a record with another key is of other bytes, which were not judged here
    is_built = record is not None and record.key == gate.plan.key and is_whole
    seconds = round(time.monotonic() - start, 3)
    covered = None
    # of some cases alone, what the others reach would count as missed
    if judged and not only:
        covered = coverage(engine_kernels(gate.context.store, tree), reached(cases))
    return GateResult(
        image=gate.plan.spec.name,
        platform=gate.plan.platform,
        image_digest=record.digest if record and is_built else None,
        engine=tree.project,
        engine_version=tree.version,
        engine_digest=tree.digest,
        patches=[] if unpatched else [spec.file for spec in gate.series.patches],
        card=card,
        environment=gate.environment.facts,
        worker=worker_digest(),
        verdict=overall(cases),
        cases=cases,
        coverage=covered,
        sandbox=gate.target(tree, card).sandbox,
        seconds=seconds,
    )


def chosen_cases(cases: Sequence[Case], only: str | None) -> list[Case]:
    """All cases, or those whose name fits a pattern such as `extend-*`."""
    chosen = [case for case in cases if only is None or fnmatchcase(case.name, only)]
    if only is not None and not chosen:
        known = there_are(only, [case.name for case in cases])
        raise GateInvalid(
            f"{only}: matches no case ({known})", f"Name one, or a pattern such as 'a-*'. {_LIST}"
        )
    return chosen


def reached(cases: Sequence[CaseResult]) -> set[tuple[str, str]]:
    """Kernels that some case compiled, by module and name."""
    return {(k.record.module, k.record.kernel) for case in cases for k in case.kernels}


def find_case(gates: Gates, name: str) -> Case:
    """One case by its name."""
    cases = {case.name: case for case in gates.cases()}
    if name not in cases:
        raise GateInvalid(f"{name}: there is no such case ({there_are(name, cases)})", _LIST)
    return cases[name]
