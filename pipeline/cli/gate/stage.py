"""Gates as a stage of `sm120 build`: what is shown, and the error the build ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.assemble.image import Built

if TYPE_CHECKING:
    from pipeline.gate.evidence import Evidence
    from pipeline.gate.stage import Staged


def judge_images(
    context: click.Context, built: list[Built], mirrors: tuple[str, ...], offline: bool
) -> dict[Built, Staged]:
    """Every image's gates, one after the other; a failure waits until all were judged."""
    # slow to import, and most builds are not judged
    from pipeline.cli.gate.context import make_gate_context
    from pipeline.cli.gate.kernels import show_kernels, show_numbers
    from pipeline.gate.stage import judge_built

    gate_context = make_gate_context(context, mirrors, offline)
    stages = {}
    for image in built:
        if not gate_context.checkout.spec(image.name).gates:
            continue
        with gate_context.store.in_use(), log.step(f"Judging {image.name}"):
            staged = judge_built(gate_context, image)
        if staged is None:
            continue
        stages[image] = staged
        # on stderr: standard output is for the tables at the end, or for --json
        if staged.smem:
            log.say(show_kernels(staged.smem, hide_passed=True))
            log.say(show_numbers(staged.smem, hide_passed=True))
    return stages


def require_all_passed(stages: Mapping[Built, Staged]) -> None:
    """Raise the error of the first image that failed; what was built and judged is kept."""
    for staged in stages.values():
        if staged.error:
            raise staged.error


def stage_table(stages: Mapping[Built, Staged]) -> str:
    """One line for each gate."""
    rows = [
        [
            *(image.name, gate.gate, gate.arch, gate.verdict, _counts(gate)),
            # a result for another card may be kept from an earlier run: it took no time now
            log.seconds(staged.seconds.get(f"{gate.gate} {gate.arch}", 0.0)),
        ]
        for image, staged in stages.items()
        for gate in staged.gates.results
    ]
    return log.table(["image", "gate", "card", "verdict", "cases", "time"], rows)


def _counts(gate: Evidence) -> str:
    verdicts = [row.verdict for row in gate.rows]
    # a gate that could not begin has no rows, only the reason
    parts = [f"{verdicts.count(v)} {v}" for v in ("passed", "accepted", "failed", "unknown")]
    return ", ".join(p for p in parts if not p.startswith("0 ")) or gate.message[:60]


def stage_json(staged: Staged | None) -> dict[str, Any]:
    """The gates' part of a build's answer."""
    if staged is None:
        return {}
    return {"gates": staged.gates.model_dump(mode="json"), "verdict": staged.gates.verdict}
