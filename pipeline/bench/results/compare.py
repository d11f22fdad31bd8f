"""Two results: what changed in the inputs, what in the numbers, and how sure that is.

Each number has a mean over trials with its 95 % confidence interval (Student's t). The change is in
percent of the first mean, with the 95 % interval of the difference of means by Welch's t, which
allows unequal variances: https://www.itl.nist.gov/div898/handbook/eda/section3/eda353.htm

Trials of one run drift together, with the temperature of a card or with what else a machine does,
and no number of trials shows how far. So a winner is named only where the change is surely more
than a least difference, which is larger than what two runs of one server drift apart. Trials that
were measured in turns share their drift: they are compared in pairs, with a smaller one. `Surely`
is 95 % for all numbers of a comparison together (Bonferroni), so that of 33 none wins by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev, variance
from typing import Literal, NamedTuple, TypeAlias

from pipeline.bench.foreign.model import ForeignNumber
from pipeline.bench.marks import tokens_off
from pipeline.bench.metrics import DEFINITIONS, interval, t_quantile
from pipeline.bench.model import Interval
from pipeline.bench.results.sides import OWN, Side, SideCell, is_judged
from pipeline.model import Frozen

STATISTIC = (
    "mean over trials, 95 % confidence by Student's t; change with its 95 % interval by Welch's t,"
    " or by pairs where the runs were measured in turns; a winner is named only where the change is"
    " surely more than the least difference, with 95 % confidence for all numbers together"
)
# Percent. The first is computed, not measured: where each run drifts by a normal error of 1 %
# (standard deviation), two runs differ by 1.41 %, and the chance that none of 33 independent
# numbers differs by more than 5 % is 0.987.
LEAST, LEAST_IN_TURNS = 5.0, 1.0
_DOUBT = 0.05
# Of mean answers: beyond it, who ends an answer early is quicker with it and serves more of them.
_ENDED_EARLY = 0.005
_BY_ANSWER = ("latency_ms", "requests_s", "goodput_s", "total_tok_s", "energy_j")
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
    # whether the two measured the same: if not, no number of trials would decide
    is_comparable: bool = True


class InputChange(Frozen):
    """An input of the numbers, on both sides; empty where it is not known."""

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
    least_percent: float
    in_turns: bool
    inputs: list[InputChange]
    cells: list[CellChange]
    only_first: list[str]
    only_second: list[str]

    def numbers(self) -> list[tuple[str, NumberChange]]:
        """Every number with its cell."""
        return [(cell.name, number) for cell in self.cells for number in cell.numbers]


class _Rule(NamedTuple):
    """When a winner is named."""

    least: float  # percent
    doubt: float  # for one number
    in_turns: bool


def compare(first: Side, second: Side, least: float | None = None) -> Comparison:
    """What changed from the first result to the second; `least` is in percent."""
    both = [name for name in first.cells if name in second.cells]
    in_turns = bool(first.turns) and first.turns == second.turns
    if least is None:
        least = LEAST_IN_TURNS if in_turns else LEAST
    count = sum(len(first.cells[n].values.keys() & second.cells[n].values.keys()) for n in both)
    rule = _Rule(least, _DOUBT / max(1, count), in_turns)
    inputs = input_changes(first.inputs, second.inputs)
    for name in both:
        one, other = first.cells[name].lengths, second.cells[name].lengths
        for kind in _lengths_apart(one, other):
            label = f"{name}: tokens of each {kind}"
            texts = {"first": f"{one[kind]:,.1f}", "second": f"{other[kind]:,.1f}"}
            inputs.append(InputChange(name=label, **texts))
    return Comparison(
        first=first.name,
        second=second.name,
        least_percent=least,
        in_turns=in_turns,
        inputs=inputs,
        cells=[_cell(name, first, second, rule) for name in both],
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


def _lengths_apart(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """By how much mean lengths differ, where that is too much for a comparison."""
    apart = {kind: other[kind] / one[kind] - 1 for kind in one if kind in other}
    return {kind: off for kind, off in apart.items() if abs(off) > _LENGTH_TOLERANCE}


def _cell(name: str, first: Side, second: Side, rule: _Rule) -> CellChange:
    one, other = first.cells[name], second.cells[name]
    why = ""  # no number of this cell can name a winner
    if first.program != second.program:
        why = f"measured by {first.program} and by {second.program}"
    elif first.program == OWN and one.load != other.load:
        why = "the two cells asked for different things"
    elif one.client_limited or other.client_limited:
        why = "the client was the limit, not the server"
    elif apart := _lengths_apart(one.lengths, other.lengths):
        kind, off = next(iter(apart.items()))
        why = f"{kind}s of the second have {tokens_off(off)}"
    early = ""  # rates of tokens can be compared, times and counts of whole answers cannot
    length, length_2 = one.lengths.get("answer"), other.lengths.get("answer")
    if length and length_2 and abs(length_2 / length - 1) > _ENDED_EARLY:
        early = (
            f"answers have {length:,.1f} tokens and {length_2:,.1f}: the shorter ones end earlier"
        )
    numbers = []
    for each in (each for each in one.values if each in other.values):
        objection = why or (early if each.partition(".")[0] in _BY_ANSWER else "")
        numbers.append(_number(each, one.values[each], other.values[each], objection, rule))
    # numbers that resemble each other, and that at least one side defines in its own way
    near, near_2 = _nearest(one), _nearest(other)
    for like in (like for like in near if like in near_2):
        a, b = near[like], near_2[like]
        if differences := [f"{n.name} {n.difference}" for n in (a, b) if n.difference]:
            objection = "; ".join(dict.fromkeys(differences))
            number = _number(like, a.values, b.values, objection, rule)
            label = a.name if a.name == b.name else f"{a.name} / {b.name}"
            numbers.append(number.model_copy(update={"name": label}))
    return CellChange(
        name=name,
        inputs=input_changes(one.settings, other.settings),
        numbers=numbers,
        notes=[*(f"first: {n}" for n in one.notes), *(f"second: {n}" for n in other.notes)],
    )


def _nearest(cell: SideCell) -> dict[str, ForeignNumber]:
    """Every number by the metric of ours that it resembles most."""
    near = {n.like: n for n in cell.others if n.like and is_judged(n.like)}
    for name, values in cell.values.items():
        near[name] = ForeignNumber(name=name, unit="", values=values, like=name)
    return near


def _number(
    name: str, first: list[float], second: list[float], why: str, rule: _Rule
) -> NumberChange:
    one, other = interval(first), interval(second)
    in_pairs = rule.in_turns and len(first) == len(second) and all(first)
    surely = change_of(first, second, rule.doubt, in_pairs=in_pairs)
    wants_more = DEFINITIONS[name.partition(".")[0]].better == "more"
    verdict: Verdict = "better" if (other.mean > one.mean) == wants_more else "worse"
    uncertain = ""
    if len(first) < 2 or len(second) < 2:
        uncertain = "one trial says nothing of its error"
    elif surely is None and one.mean == other.mean:
        uncertain = "both are zero"
    elif surely and (surely.low or 0) <= rule.least and (surely.high or 0) >= -rule.least:
        uncertain = f"not surely more than {rule.least:g} % apart"
    return NumberChange(
        name=name,
        first=one,
        second=other,
        change=change_of(first, second, in_pairs=in_pairs),
        verdict="undecided" if why or uncertain else verdict,
        why=why or uncertain,
        is_comparable=not why,
    )


def change_of(
    first: Sequence[float],
    second: Sequence[float],
    doubt: float = _DOUBT,
    *,
    in_pairs: bool = False,
) -> Change | None:
    """The difference of two means in percent of the first, by Welch's t or by pairs."""
    base = fmean(first)
    if base == 0:
        return None
    percent, half = (fmean(second) - base) / abs(base) * 100, 0.0
    if len(first) < 2 or len(second) < 2:
        return Change(percent=round(percent, 3))
    parts = [variance(values) / len(values) for values in (first, second)]
    if in_pairs:
        apart = [(b / a - 1) * 100 for a, b in zip(first, second, strict=True)]
        percent = fmean(apart)
        half = t_quantile(doubt, len(apart) - 1) * stdev(apart) / math.sqrt(len(apart))
    elif sum(parts):
        # Welch and Satterthwaite; rounded down, which widens the interval
        by_size = zip(parts, (first, second), strict=True)
        freedom = sum(parts) ** 2 / sum(p**2 / (len(values) - 1) for p, values in by_size)
        half = t_quantile(doubt, max(1, int(freedom))) * math.sqrt(sum(parts)) / abs(base) * 100
    percent = round(percent, 3)
    return Change(percent=percent, low=round(percent - half, 3), high=round(percent + half, 3))
