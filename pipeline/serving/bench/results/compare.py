"""Two results: what changed in the inputs, what in the numbers, and how sure that is.

Each number has a mean over trials with its 95 % confidence interval (Student's t). The change is in
percent of the first mean, with the 95 % interval of the difference of means by Welch's t, which
allows unequal variances: https://www.itl.nist.gov/div898/handbook/eda/section3/eda353.htm

Trials of one run drift together, with the temperature of a card or with what else a machine does,
and no number of trials shows how far. So a winner is named only where the change is surely more
than a least difference, which is larger than what two runs of one server drift apart. Trials that
were measured in turns share their drift: they are compared in pairs, with a smaller one. `Surely`
is 95 % for all numbers of a comparison together (Bonferroni), so that of 33 none wins by chance.

The gate for CI and canaries passes a number whose whole 95 % interval of the change is within what
is allowed; worse is one that is beyond it and surely worse. In between the trials do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Literal, TypeAlias

from pipeline.core.errors import RunInvalid
from pipeline.core.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.serving.bench.foreign import ForeignNumber, read_foreign
from pipeline.serving.bench.marks import cell_marks, tokens_off
from pipeline.serving.bench.metrics import DEFINITIONS, independent_numbers, interval, t_quantile
from pipeline.serving.bench.model import BenchRun, Interval
from pipeline.serving.bench.place import requests_of, runs_in
from pipeline.serving.bench.record import read_run, run_bytes
from pipeline.serving.bench.results.recompute import require_as_measured

OWN = "sm120 bench"
STATISTIC = (
    "mean over trials, 95 % confidence by Student's t; change with its 95 % interval by Welch's t,"
    " or by pairs where the runs were measured in turns; a winner is named only where the change is"
    " surely more than the least difference, with 95 % confidence for all numbers together"
)
# Percent. The first is computed, not measured: where each run drifts by a normal error of 1 %
# (standard deviation), two runs differ by 1.41 %, and the chance that none of 33 independent
# numbers differs by more than 5 % is 0.987.
LEAST, LEAST_IN_TURNS = 5.0, 1.0
# Where a side has one start of its engine: one image was seen to differ by 4 to 5 % between two
# starts. With that as the standard deviation, 95 % of two starts differ by less than 8.8 %.
LEAST_ONE_START = 10.0
ONE_START = (
    "One image may differ by some percent from one start to the next, and trials of one start do"
    " not show it: `sm120 bench RECIPE --starts 3` measures several"
)
_DOUBT = 0.05
# Of mean answers: beyond it, a server that ends answers early is quicker and serves more of them.
_ENDED_EARLY = 0.005
_BY_ANSWER = ("latency_ms", "requests_s", "goodput_s", "total_tok_s", "energy_j")
# Of the mean real lengths: beyond it, the two sides did not measure the same work.
_LENGTH_TOLERANCE = 0.05
Verdict: TypeAlias = Literal["better", "worse", "undecided"]
# means: of a few hundred requests the 99th percentile is two or three of them
GATED = ("output_tok_s", "ttft_ms.mean", "tpot_ms.mean")
# When a winner is named: the least percent, the doubt for one number, whether in turns.
_Rule: TypeAlias = tuple[float, float, bool]
ComparisonVerdict: TypeAlias = Literal["passed", "worse", "undecided"]


class SideCell(Frozen):
    """One cell: the values of each number, one for each trial that counts."""

    load: str  # equal only for equal loads
    settings: dict[str, str] = {}
    values: dict[str, list[float]]
    notes: list[str] = []
    client_limited: bool = False
    # what the server counted in a request on average, whatever was asked for
    lengths: dict[str, float] = {}
    others: list[ForeignNumber] = []  # numbers that are defined in another way than ours


class Side(Frozen):
    """One of two results."""

    name: str
    program: str
    digest: Digest
    inputs: dict[str, str]
    cells: dict[str, SideCell]
    turns: str = ""  # the same for two runs whose trials were measured in turns
    starts: int = 1  # of the engine, in the cell that has the fewest


def read_side(path: Path) -> Side:
    """Reads a run, or the result of another program, from its folder or file."""
    if runs := runs_in(path):
        if len(runs) > 1:
            names = ", ".join(run.name for run in runs)
            raise RunInvalid(f"{path}: holds {len(runs)} runs", f"Name one of them: {names}")
        run = read_run(runs[0])
        # a baseline may be kept without them; where they are, its numbers must follow
        if requests_of(runs[0]):
            require_as_measured(runs[0], run)
        return side_of(run, str(path))
    foreign = read_foreign(path)
    first, *rest = (cell.settings for cell in foreign.cells)
    # settings that all cells have alike
    shared = {k: v for k, v in first.items() if all(each.get(k) == v for each in rest)}
    cells = {
        cell.name: SideCell(
            load=f"{foreign.program} {cell.name}",
            settings={k: v for k, v in cell.settings.items() if k not in shared},
            values={n.ours: n.values for n in cell.numbers if n.ours and is_judged(n.ours)},
            others=[number for number in cell.numbers if not number.ours],
        )
        for cell in foreign.cells
    }
    name, program, digest = str(path), foreign.program, foreign.digest
    return Side(name=name, program=program, digest=digest, inputs=shared, cells=cells)


def side_of(run: BenchRun, name: str) -> Side:
    """Makes a side of a run of ours."""
    known = {
        **run.inputs.model_dump(exclude_none=True),
        **{f"server.{k}": v for k, v in run.server.model_dump(exclude={"settings"}).items()},
        **{f"server.settings.{k}": v for k, v in run.server.settings.items()},
        **{f"client.{k}": v for k, v in run.client.model_dump().items()},
        "kernels": "; ".join(run.inputs.kernels) or None,
    }
    inputs = {k: str(v) for k, v in sorted(known.items()) if v is not None}
    # what was asked of the server; not how often, nor what it was called
    about = {"prompts", "sampling", "objectives", "limits", "seed"}
    asked, cells = run.workload.model_dump(mode="json", include=about), {}
    for result in run.cells:
        good = result.good_trials
        numbers = independent_numbers(good)
        names = [name for name in (numbers[0] if numbers else {}) if is_judged(name)]
        notes = [*cell_marks(good), *(reason for trial in result.trials for reason in trial.void)]
        completed = sum(trial.metrics.completed for trial in good)
        prompts = sum(trial.metrics.input_tokens for trial in good)
        answers = sum(trial.metrics.output_tokens for trial in good)
        load = canonical_json({**asked, "cell": result.cell.model_dump(mode="json")})
        tokens = (("prompt", prompts), ("answer", answers))
        cells[result.cell.name] = SideCell(
            load=sha256_of(load),
            values={name: [each[name] for each in numbers if name in each] for name in names},
            notes=list(dict.fromkeys(notes)),
            client_limited=any(m.kind == "client-limited" for trial in good for m in trial.marks),
            # none: the server did not count
            lengths={kind: n / completed for kind, n in tokens if completed and n},
        )
    starts = [len({trial.start for trial in result.good_trials}) for result in run.cells]
    return Side(
        name=name,
        program=OWN,
        digest=sha256_of(run_bytes(run)),
        inputs=inputs,
        cells=cells,
        turns=run.turns,
        starts=min(starts, default=1),
    )


def is_judged(name: str) -> bool:
    """Whether either more or less of a metric is better."""
    return DEFINITIONS[name.partition(".")[0]].better != "none"


class MetricChange(Frozen):
    """How much the second differs from the first, in percent of the first."""

    percent: float
    low: float | None = None
    high: float | None = None


class NumberChange(Frozen):
    """One number of one cell on both sides."""

    name: str  # of ours; where a side defines it in another way, the names of both sides
    first: Interval
    second: Interval
    change: MetricChange | None  # none where the first is zero
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


class BenchComparison(Frozen):
    """The whole answer of `sm120 bench compare`."""

    first: str
    second: str
    statistic: str = STATISTIC
    least_percent: float
    in_turns: bool
    starts: tuple[int, int] = (1, 1)  # of the engine, on both sides
    inputs: list[InputChange]
    cells: list[CellChange]
    only_first: list[str]
    only_second: list[str]

    def numbers(self) -> list[tuple[str, NumberChange]]:
        """Every number with its cell."""
        return [(cell.name, number) for cell in self.cells for number in cell.numbers]


def compare_runs(first: Side, second: Side, least: float | None = None) -> BenchComparison:
    """What changed from the first result to the second; `least` is in percent."""
    both = [name for name in first.cells if name in second.cells]
    in_turns = bool(first.turns) and first.turns == second.turns
    starts = first.starts, second.starts
    if least is None:
        # in turns two servers are compared as they run; otherwise starts are part of the difference
        least = LEAST if min(starts) > 1 else LEAST_ONE_START
        least = LEAST_IN_TURNS if in_turns else least
    count = sum(len(first.cells[n].values.keys() & second.cells[n].values.keys()) for n in both)
    rule = least, _DOUBT / max(1, count), in_turns
    inputs = input_changes(first.inputs, second.inputs)
    for name in both:
        one, other = first.cells[name].lengths, second.cells[name].lengths
        for kind in _lengths_apart(one, other):
            label = f"{name}: tokens of each {kind}"
            texts = {"first": f"{one[kind]:,.1f}", "second": f"{other[kind]:,.1f}"}
            inputs.append(InputChange(name=label, **texts))
    return BenchComparison(
        first=first.name,
        second=second.name,
        least_percent=least,
        in_turns=in_turns,
        starts=starts,
        inputs=inputs,
        cells=[_cell(name, first, second, rule) for name in both],
        only_first=[name for name in first.cells if name not in second.cells],
        only_second=[name for name in second.cells if name not in first.cells],
    )


def input_changes(first: dict[str, str], second: dict[str, str]) -> list[InputChange]:
    """What differs between the sides, in the order of its name; first which kernels ran."""
    return [
        InputChange(name=name, first=first.get(name, ""), second=second.get(name, ""))
        for name in sorted({*first, *second}, key=lambda name: (name != "kernels", name))
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
        near[name] = ForeignNumber(name=name, values=values, like=name)
    return near


def _number(
    name: str, first: list[float], second: list[float], why: str, rule: _Rule
) -> NumberChange:
    (least, doubt, in_turns), one, other = rule, interval(first), interval(second)
    in_pairs = in_turns and len(first) == len(second) and all(first)
    surely = change_of(first, second, doubt, in_pairs=in_pairs)
    wants_more = DEFINITIONS[name.partition(".")[0]].better == "more"
    verdict: Verdict = "better" if (other.mean > one.mean) == wants_more else "worse"
    uncertain = ""
    if len(first) < 2 or len(second) < 2:
        uncertain = "one trial says nothing of its error"
    elif surely is None and one.mean == other.mean:
        uncertain = "both are zero"
    elif surely and (surely.low or 0) <= least and (surely.high or 0) >= -least:
        uncertain = f"not surely more than {least:g} % apart"
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
) -> MetricChange | None:
    """The difference of two means in percent of the first, by Welch's t or by pairs."""
    base = fmean(first)
    if base == 0:
        return None
    percent, half = (fmean(second) - base) / abs(base) * 100, 0.0
    if len(first) < 2 or len(second) < 2:
        return MetricChange(percent=round(percent, 3))
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
    return MetricChange(
        percent=percent, low=round(percent - half, 3), high=round(percent + half, 3)
    )


class GateRow(Frozen):
    """The verdict on one number of one cell."""

    cell: str
    number: str
    verdict: ComparisonVerdict
    message: str


def judge_gate(
    comparison: BenchComparison, allowed_percent: float, names: Sequence[str]
) -> list[GateRow]:
    """Judges every gated number of every cell of the baseline; a missing one never passes."""
    missing: ComparisonVerdict = "undecided"
    found = [
        (cell, "", missing, "the candidate has no such cell") for cell in comparison.only_first
    ]
    for cell in comparison.cells:
        numbers = {number.name: number for number in cell.numbers}
        if (failed := numbers.get("failed")) and failed.second.mean > failed.first.mean:
            message = f"failed requests: {failed.second.mean:g}, {failed.first.mean:g} before"
            found.append((cell.name, "failed", "worse", message))
        for name in names:
            verdict: ComparisonVerdict = "undecided"
            number = numbers.get(name)
            change = number.change if number else None
            if number is None or change is None:
                message = "the baseline is zero" if number else "is not on both sides"
            elif change.low is None or change.high is None:
                message = f"{change.percent:+.1f} %: {number.why}"
            else:
                message = f"{change.percent:+.1f} % ({change.low:+.1f} to {change.high:+.1f})"
                wants_more = DEFINITIONS[name.partition(".")[0]].better == "more"
                worst, loss = change.high, change.percent
                if wants_more:
                    worst, loss = -change.low, -change.percent
                if not number.is_comparable:
                    message += f": {number.why}"
                elif worst <= allowed_percent:
                    verdict = "passed"
                elif loss > allowed_percent and number.verdict == "worse":
                    verdict, message = "worse", f"{message}, {allowed_percent:g} % allowed"
                else:
                    message += f": cannot be told from {allowed_percent:g} %; more trials decide it"
            found.append((cell.name, name, verdict, message))
    fields = ("cell", "number", "verdict", "message")
    return [GateRow.model_validate(dict(zip(fields, row, strict=True))) for row in found]
