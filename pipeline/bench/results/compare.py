"""Two results: what changed in the inputs, what in the numbers, and how sure that is.

Each number has a mean over trials with its 95 % confidence interval (Student's t). A winner is
named only where the two intervals do not touch. The change is in percent of the first mean, with
the 95 % interval of the difference of means by Welch's t, which allows unequal variances:
https://www.itl.nist.gov/div898/handbook/eda/section3/eda353.htm
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Literal, TypeAlias

from pipeline.bench.marks import tokens_off
from pipeline.bench.metrics import DEFINITIONS, interval, t95
from pipeline.bench.model import Interval
from pipeline.bench.results.sides import OWN, Side, SideCell
from pipeline.model import Frozen

STATISTIC = (
    "mean over trials, 95 % confidence by Student's t; change with its 95 % interval by Welch's t;"
    " a winner is named only where the two intervals do not touch"
)
# Of the mean real lengths: beyond it, the two sides did not measure the same work.
_LENGTH_TOLERANCE = 0.05
Verdict: TypeAlias = Literal["better", "worse", "undecided"]


class Change(Frozen):
    """How much the second differs from the first, in percent of the first."""

    percent: float
    low: float | None = None
    high: float | None = None


class NumberChange(Frozen):
    """One number of one cell on both sides."""

    name: str  # of ours; where a side defines it in another way, the names of both sides
    first: Interval
    second: Interval
    change: Change | None  # none where the first is zero
    verdict: Verdict
    why: str = ""  # no winner is named


class InputChange(Frozen):
    """Something that stands behind the numbers, on both sides; empty where it is not known."""

    name: str
    first: str
    second: str


class CellChange(Frozen):
    """One cell that both sides have."""

    name: str
    inputs: list[InputChange]
    numbers: list[NumberChange]
    notes: list[str]


class Comparison(Frozen):
    """The whole answer of `sm120 bench compare`."""

    first: str
    second: str
    statistic: str = STATISTIC
    inputs: list[InputChange]
    cells: list[CellChange]
    only_first: list[str]
    only_second: list[str]

    def numbers(self) -> list[tuple[str, NumberChange]]:
        """Every number with its cell."""
        return [(cell.name, number) for cell in self.cells for number in cell.numbers]


def compare(first: Side, second: Side) -> Comparison:
    """What changed from the first result to the second."""
    both = [name for name in first.cells if name in second.cells]
    return Comparison(
        first=first.name,
        second=second.name,
        inputs=[
            *input_changes(first.inputs, second.inputs),
            *(
                change
                for name in both
                for change in _length_changes(name, first.cells[name], second.cells[name])
            ),
        ],
        cells=[_cell(name, first, second) for name in both],
        only_first=[name for name in first.cells if name not in second.cells],
        only_second=[name for name in second.cells if name not in first.cells],
    )


def input_changes(first: dict[str, str], second: dict[str, str]) -> list[InputChange]:
    """What is not the same on both sides, in the order of its name."""
    return [
        InputChange(name=name, first=first.get(name, ""), second=second.get(name, ""))
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]


def _lengths_apart(one: SideCell, other: SideCell) -> dict[str, float]:
    """By how much mean lengths differ, where that is too much for a comparison."""
    apart = {k: other.lengths[k] / one.lengths[k] - 1 for k in one.lengths if k in other.lengths}
    return {kind: off for kind, off in apart.items() if abs(off) > _LENGTH_TOLERANCE}


def _length_changes(name: str, one: SideCell, other: SideCell) -> list[InputChange]:
    return [
        InputChange(
            name=f"{name}: tokens of each {kind}",
            first=f"{one.lengths[kind]:,.1f}",
            second=f"{other.lengths[kind]:,.1f}",
        )
        for kind in _lengths_apart(one, other)
    ]


def _cell(name: str, first: Side, second: Side) -> CellChange:
    one, other = first.cells[name], second.cells[name]
    why = _objection(first, second, one, other) or _other_lengths(one, other)
    names = [each for each in one.values if each in other.values]
    notes = [f"first: {note}" for note in one.notes] + [f"second: {note}" for note in other.notes]
    numbers = [_number(each, one.values[each], other.values[each], why) for each in names]
    return CellChange(
        name=name,
        inputs=input_changes(one.settings, other.settings),
        numbers=[*numbers, *_alike(one, other)],
        notes=notes,
    )


def _objection(first: Side, second: Side, one: SideCell, other: SideCell) -> str:
    """Why no number of a cell can name a winner."""
    if first.program != second.program:
        return f"measured by {first.program} and by {second.program}"
    if first.program == OWN and one.load != other.load:
        return "the two cells asked for different things"
    if one.client_limited or other.client_limited:
        return "the client was the limit, not the server"
    return ""


def _other_lengths(one: SideCell, other: SideCell) -> str:
    """Why the same load was not the same work."""
    for kind, off in _lengths_apart(one, other).items():
        return f"{kind}s of the second have {tokens_off(off)}"
    return ""


def _alike(one: SideCell, other: SideCell) -> list[NumberChange]:
    """Numbers that are near each other, and that at least one side defines in its own way."""
    first, second = one.nearest(), other.nearest()
    found = []
    for like in (like for like in first if like in second):
        a, b = first[like], second[like]
        if not (a.difference or b.difference):
            continue
        differences = [f"{n.name} {n.difference}" for n in (a, b) if n.difference]
        number = _number(like, a.values, b.values, "; ".join(dict.fromkeys(differences)))
        label = a.name if a.name == b.name else f"{a.name} / {b.name}"
        found.append(number.model_copy(update={"name": label}))
    return found


def _number(name: str, first: list[float], second: list[float], why: str) -> NumberChange:
    one, other = interval(first), interval(second)
    why = why or _too_uncertain(one, other)
    is_more = other.mean > one.mean
    wants_more = DEFINITIONS[name.partition(".")[0]].better == "more"
    winner: Verdict = "better" if is_more == wants_more else "worse"
    return NumberChange(
        name=name,
        first=one,
        second=other,
        change=change_of(first, second),
        verdict="undecided" if why else winner,
        why=why,
    )


def _too_uncertain(one: Interval, other: Interval) -> str:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return "one trial says nothing of its error"
    if one.low <= other.high and other.low <= one.high:
        return "the intervals overlap"
    return ""


def change_of(first: Sequence[float], second: Sequence[float]) -> Change | None:
    """The difference of two means in percent of the first, by Welch's t."""
    base = fmean(first)
    if base == 0:
        return None
    percent = _rounded((fmean(second) - base) / abs(base) * 100)
    if len(first) < 2 or len(second) < 2:
        return Change(percent=percent)
    half = _half_width(first, second) / abs(base) * 100
    return Change(percent=percent, low=_rounded(percent - half), high=_rounded(percent + half))


def _half_width(first: Sequence[float], second: Sequence[float]) -> float:
    parts = [variance(values) / len(values) for values in (first, second)]
    if not sum(parts):
        return 0.0
    # Welch and Satterthwaite; rounded down, which widens the interval
    by_size = zip(parts, (first, second), strict=True)
    freedom = sum(parts) ** 2 / sum(p**2 / (len(values) - 1) for p, values in by_size)
    return t95(max(1, int(freedom))) * math.sqrt(sum(parts))


def _rounded(value: float) -> float:
    return round(value, 3)
