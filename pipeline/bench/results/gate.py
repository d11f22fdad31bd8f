"""A gate for CI and canaries: a candidate may be worse than its baseline by so much, and no more.

Passed is a number whose whole 95 % interval of the change is within what is allowed; worse is one
that is beyond it and surely worse. In between the trials do not decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from pipeline.bench.metrics import DEFINITIONS
from pipeline.bench.results.compare import Comparison, NumberChange
from pipeline.model import Frozen

# means: of a few hundred requests the 99th percentile is two or three of them
GATED = ("output_tok_s", "ttft_ms.mean", "tpot_ms.mean")
GateVerdict: TypeAlias = Literal["passed", "worse", "undecided"]


class GateRow(Frozen):
    """The verdict on one number of one cell."""

    cell: str
    number: str
    verdict: GateVerdict
    message: str


def judge(comparison: Comparison, allowed_percent: float, names: Sequence[str]) -> list[GateRow]:
    """Every gated number of every cell that the baseline has; a missing one is never passed."""
    rows = [
        GateRow(cell=cell, number="", verdict="undecided", message="the candidate has no such cell")
        for cell in comparison.only_first
    ]
    for cell in comparison.cells:
        numbers = {number.name: number for number in cell.numbers}
        if (failed := numbers.get("failed")) and failed.second.mean > failed.first.mean:
            message = f"failed requests: {failed.second.mean:g}, {failed.first.mean:g} before"
            rows.append(GateRow(cell=cell.name, number="failed", verdict="worse", message=message))
        for name in names:
            verdict, message = _judged(numbers.get(name), allowed_percent)
            rows.append(GateRow(cell=cell.name, number=name, verdict=verdict, message=message))
    return rows


def _judged(number: NumberChange | None, allowed: float) -> tuple[GateVerdict, str]:
    if number is None:
        return "undecided", "is not on both sides"
    change = number.change
    if change is None:
        return "undecided", "the baseline is zero"
    if change.low is None or change.high is None:
        return "undecided", f"{change.percent:+.1f} %: {number.why}"
    text = f"{change.percent:+.1f} % ({change.low:+.1f} to {change.high:+.1f})"
    if not number.is_comparable:
        return "undecided", f"{text}: {number.why}"
    wants_more = DEFINITIONS[number.name.partition(".")[0]].better == "more"
    worst, loss = (-change.low, -change.percent) if wants_more else (change.high, change.percent)
    if worst <= allowed:
        return "passed", text
    if loss > allowed and number.verdict == "worse":
        return "worse", f"{text}, {allowed:g} % allowed"
    return "undecided", f"{text}: cannot be told from {allowed:g} %; more trials decide it"
