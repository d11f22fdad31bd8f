"""`sm120 gate run --dry-run`: what would be judged, and what would be fetched for it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import click

from pipeline import log
from pipeline.assemble.image import find_built
from pipeline.assemble.plan import ImagePlan, plan_image
from pipeline.cli.context import pick_platform, say_json
from pipeline.cli.gate.choice import GateChoice
from pipeline.cli.gate.context import chosen_card
from pipeline.gate.numerics import read_numeric_cases
from pipeline.gate.smem.cases import Gates, read_gates
from pipeline.gate.smem.context import GateContext
from pipeline.gate.smem.engine import engine_pin, engine_work
from pipeline.gate.smem.environment import environment_work
from pipeline.gate.smem.image_gate import chosen_cases, chosen_series
from pipeline.lock.model import Pin

_NOTHING = "nothing to fetch"
# Of one core, for a case that was never judged: compiled, or run by Triton's interpreter.
_SECONDS = {"smem": 6.0, "numerics": 2.5}


@dataclass(frozen=True)
class _Planned:
    """One gate that would run: for which card, on what."""

    gate: str
    arch: str
    cases: tuple[str, ...] = ()
    note: str = ""


def show_gate_plan(context: GateContext, choice: GateChoice, as_json: bool) -> None:
    """The gates of an image as they would run; nothing is made, fetched or compiled."""
    spec = context.checkout.spec(choice.name)
    plan = plan_image(context.checkout, choice.name, pick_platform(spec, choice.platform))
    planned: list[_Planned] = []
    fetch: list[Pin] | None = []
    if choice.wants_kernels(spec.gates):
        gates = read_gates(context.checkout, choice.name)
        planned += _kernels(context, choice, plan, gates)
        fetch = _to_fetch(context, plan, gates)
    if choice.wants_objects(spec.gates):
        planned += _objects(context, choice, plan)
    n_bytes = None if fetch is None else sum(pin.size_bytes for pin in fetch)
    if as_json:
        rows = [{"gate": p.gate, "arch": p.arch, "cases": p.cases, "note": p.note} for p in planned]
        row = {"image": choice.name, "platform": plan.platform, "gates": rows}
        return say_json({**row, "fetch_bytes": n_bytes, "dry_run": True})
    table = [[p.gate, p.arch, len(p.cases) or None, p.note or "-"] for p in planned]
    click.echo(log.table(["gate", "card", "cases", "of"], table))
    click.echo(f"\n{choice.name} for {plan.platform}: {_fetch_text(context, fetch)}")


def say_what_it_takes(context: GateContext, choice: GateChoice) -> set[str]:
    """One line before gates of kernels begin: cases, downloads, minutes; returns which run."""
    spec = context.checkout.spec(choice.name)
    plan = plan_image(context.checkout, choice.name, pick_platform(spec, choice.platform))
    gates = read_gates(context.checkout, choice.name)
    planned = _kernels(context, choice, plan, gates)
    cores = len(os.sched_getaffinity(0))
    seconds = sum(len(p.cases) * _SECONDS[p.gate] for p in planned) / cores
    counts = " and ".join(f"{log.count(len(p.cases), 'case')} of {p.gate}" for p in planned)
    log.say(
        f"{choice.name}: {counts}, {_fetch_text(context, _to_fetch(context, plan, gates))}; about"
        f" {max(1, round(seconds / 60))} min on {log.count(cores, 'core')}, less for cases that"
        " were judged before"
    )
    return {p.gate for p in planned}


def _kernels(
    context: GateContext, choice: GateChoice, plan: ImagePlan, gates: Gates
) -> list[_Planned]:
    arch = chosen_card(context, choice.name, choice.platform, choice.arch).arch
    pin = engine_pin(context, plan, gates.setup.package, None)
    series = chosen_series(context, plan, choice.series)
    count = log.count(len(series.patches), "patch", "patches")
    note = f"{pin.name} {pin.version} {'unpatched' if choice.unpatched else f'with {count}'}"
    asked = {
        "smem": gates.cases(),
        "numerics": read_numeric_cases(context.checkout, choice.name, gates),
    }
    asked = {gate: cases for gate, cases in asked.items() if choice.asks_for(gate)}
    # numerics has cases of its own: a pattern is wrong only where neither has one
    chosen = {c.name for c in chosen_cases([c for cs in asked.values() for c in cs], choice.case)}
    names = {g: tuple(c.name for c in cases if c.name in chosen) for g, cases in asked.items()}
    return [_Planned(gate, arch, cases, note) for gate, cases in names.items() if cases]


def _objects(context: GateContext, choice: GateChoice, plan: ImagePlan) -> list[_Planned]:
    built = find_built(context.store, plan)
    note = (
        f"{built.digest}, {log.size(built.size_bytes)}" if built else "not judged: it is not built"
    )
    archs = [choice.arch] if choice.arch else plan.spec.promised_archs
    return [_Planned("arch", arch, note=note) for arch in archs]


def _to_fetch(context: GateContext, plan: ImagePlan, gates: Gates) -> list[Pin] | None:
    """Wheels that the gate would fetch, each once; none where an index must be asked first."""
    made = environment_work(context, plan, gates.setup.wheels)
    if made is None:
        return None
    engine = engine_work(context, plan, engine_pin(context, plan, gates.setup.package, None))
    return list({pin.sha256: pin for pin in (*made.fetch, *engine.fetch)}.values())


def _fetch_text(context: GateContext, fetch: list[Pin] | None) -> str:
    if fetch is None:
        return f"wheels for {context.host}, this machine, would be looked up in the index"
    n_bytes = sum(pin.size_bytes for pin in fetch)
    return f"{log.count(len(fetch), 'file')} to fetch, {log.size(n_bytes)}" if fetch else _NOTHING
