"""Gates as a stage of `sm120 build`: what is shown, and how the build ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.assemble.image import Built
    from pipeline.gate.evidence import Evidence
    from pipeline.gate.stage import Staged


def judge_images(
    context: click.Context, built: list[Built], mirrors: tuple[str, ...], offline: bool
) -> dict[Built, Staged]:
    """Every image's gates, one after the other; a failure waits until all were judged."""
    from pipeline.cli.gates import make_gate_context, show
    from pipeline.cli.numerics import show_numbers
    from pipeline.gate.stage import judge_built

    gate_context = make_gate_context(context, mirrors, offline)
    found = {}
    for image in built:
        if not gate_context.checkout.spec(image.name).gates:
            continue
        with gate_context.store.in_use(), log.step(f"Judging {image.name}"):
            staged = judge_built(gate_context, image)
        if staged is None:
            continue
        found[image] = staged
        if staged.smem:
            log.say(show(staged.smem))
            log.say(show_numbers(staged.smem))
    return found


def require_all_passed(stages: Mapping[Built, Staged]) -> None:
    """End as the first image that failed ends; what was built and judged is kept."""
    for staged in stages.values():
        if staged.error:
            raise staged.error


def stage_table(stages: Mapping[Built, Staged]) -> str:
    """A line a gate."""
    rows = [
        [
            *(image.name, found.gate, found.arch, found.verdict, _counts(found)),
            log.seconds(staged.seconds.get(f"{found.gate} {found.arch}", 0.0)),
        ]
        for image, staged in stages.items()
        for found in staged.gates.results
    ]
    return log.table(["image", "gate", "card", "verdict", "judged", "time"], rows)


def _counts(found: Evidence) -> str:
    told = [row.verdict for row in found.rows]
    parts = [f"{told.count(v)} {v}" for v in ("passed", "accepted", "failed", "unknown")]
    return ", ".join(p for p in parts if not p.startswith("0 ")) or found.message[:60]


def stage_json(staged: Staged | None) -> dict[str, Any]:
    """The gates' part of a build's answer."""
    if staged is None:
        return {}
    return {"gates": staged.gates.model_dump(mode="json"), "verdict": staged.gates.verdict}
