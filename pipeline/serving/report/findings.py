"""What follows from the numbers: facts, warnings and advice, computed and never written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from pipeline.core import log
from pipeline.serving.report import model
from pipeline.serving.report.model import (
    Claim,
    PublishedReference,
    ReportCell,
    ReportFinding,
    Series,
)

# Tables round their values: this near counts as the same.
_SAME = 0.005
# A smaller gain in output for more load is not worth a wait that grows by that factor.
_WORTH, _LONGER = 0.10, 1.5
# Below this share of its concurrency, a server had less load than the name of a cell says.
_FEW_IN_FLIGHT = 0.75
# Real lengths vary a little around what was asked for.
_LENGTHS_OFF = 0.10
# Beyond it, a gap is no longer the time of one token.
_SEVERAL_AT_ONCE = 1.5
# Peak last: it may by chance equal one of the others.
_THROUGHPUT = ("output_tok_s", "total_tok_s", "peak_output_tok_s")
# Contradictions; `incomplete` and `unsigned` only say how far a check came.
WRONG = ("changed", "broken")


def find_report_findings(data: model.ReportData) -> list[ReportFinding]:
    """All findings, what is wrong first."""
    found: list[ReportFinding] = []
    for measured in data.measured:
        texts: list[str] = []
        if isinstance(measured, PublishedReference):
            for claim in measured.claims:
                found += _about_claim(measured, claim)
            texts += [f"{c.says} {c.but} ({c.source})" for c in measured.corrections]
        why = "the evidence says why, and the numbers prove nothing."
        texts += [f"{e.name}: {e.state}; {why}" for e in measured.evidence if e.state in WRONG]
        texts += [f"{note.kind}: {note.message}" for note in measured.notes]
        found += [_say("flag", measured.name, text) for text in texts]
        for series in measured.series:
            found += [*_doubts(series), *_speeds(series)]
        for memory in measured.memory:
            unit, kv, free, tokens = memory.unit, memory.kv, memory.free, memory.kv_tokens
            if kv and free and tokens and free > kv:
                text = (
                    f"{{0}} {unit} of each card stayed free beside {{1}} {unit} of KV cache: at its"
                    " own size, room for {2} tokens more, as far as the engine does not need it."
                )
                more = free / kv * tokens
                found.append(_say("fact", memory.name, text, (free, 2), (kv, 2), (more, 0)))
    # a run against a document, only where load and lengths are the same
    published = [series for reference in data.references for series in reference.series]
    for mine in (series for run in data.runs for series in run.series if series.lengths):
        for other in (series for series in published if series.lengths == mine.lengths):
            theirs = {c.concurrency: c.mean("output_tok_s") or 0 for c in _by_load(other)}
            for cell in [c for c in _by_load(mine) if c.concurrency in theirs][-1:]:
                text = (
                    f"At concurrency {{0}}: {{1}} tok/s output, where {other.name} states {{2}}."
                    " Another client, host and stack: no comparison of engines."
                )
                speeds = cell.mean("output_tok_s") or 0, theirs[cell.concurrency]
                load = (cell.concurrency or 1, 0)
                found.append(_say("fact", mine.name, text, load, *map(_number, speeds)))
    order = {"flag": 0, "fact": 1, "advice": 2}
    return sorted(found, key=lambda finding: order[finding.kind])


def _say(
    kind: Literal["flag", "fact", "advice"], about: str, text: str, *numbers: tuple[float, int]
) -> ReportFinding:
    quantities = [model.Quantity(value=round(value, 6), decimals=d) for value, d in numbers]
    return ReportFinding(kind=kind, about=about, text=text, numbers=quantities)


def _number(value: float) -> tuple[float, int]:
    """A value, and the digits after the point that a reader can use."""
    size = abs(value)
    return value, 0 if value == int(value) or size >= 100 else 1 if size >= 10 else 2


def claimed(reference: PublishedReference, claim: Claim) -> tuple[ReportCell, bool] | None:
    """The last cell of a document's own table that has its headline number.

    And whether that is input and output together, while the headline does not say so.
    """
    for series in (each for each in reference.series if each.name == claim.series):
        for metric in _THROUGHPUT:
            for cell in reversed(series.cells):
                mean = cell.mean(metric)
                if mean is not None and _is_near(mean, claim):
                    return cell, metric == "total_tok_s" and "total" not in claim.text.lower()
    return None


def _is_near(value: float, claim: Claim) -> bool:
    return abs(value - claim.value) <= _SAME * claim.value


def _about_claim(reference: PublishedReference, claim: Claim) -> Iterator[ReportFinding]:
    # a claim without a series has no table that it could be found in
    series = next((each for each in reference.series if each.name == claim.series), None)
    if series is None:
        return
    if found := claimed(reference, claim):
        cell, is_mislabelled = found
        if not is_mislabelled:
            return
        text = (
            f"The headline {{0}} {claim.unit}, printed as “{claim.text}”, is total throughput:"
            " input and output tokens together, at concurrency {1}."
        )
        numbers = [_number(claim.value), (cell.concurrency or 1, 0)]
        if (output := cell.mean("output_tok_s")) is not None:
            text += " Output throughput there was {2} tok/s."
            numbers.append(_number(output))
            peaks = [(peak, c) for c in series.cells if (peak := c.mean("peak_output_tok_s"))]
            if peaks:
                peak, at = max(peaks, key=lambda pair: pair[0])
                most = "The largest peak over one second in its table is"
                text += f" {most} {{3}} tok/s, at concurrency {{4}}."
                numbers += [_number(peak), (at.concurrency or 1, 0)]
        yield _say("flag", series.name, text, *numbers)
        return
    for cell in series.cells:
        output, tpot = cell.mean("output_tok_s"), cell.mean("tpot_ms.mean")
        if output is None or tpot is None or not cell.concurrency:
            continue
        # what many a table calls the speed of a user
        if _is_near(output / cell.concurrency, claim):
            text = (
                f"“{claim.text}” {{0}} {claim.unit} is output throughput divided by {{1}} requests,"
                " waiting included. While its answer streams, a user gets {2} tok/s (1 / TPOT)."
            )
            user = (1e3 / tpot, 1)
            yield _say("flag", series.name, text, _number(claim.value), (cell.concurrency, 0), user)


def _doubts(series: Series) -> Iterator[ReportFinding]:
    """Void cells, one sentence for each kind of mark, and what the numbers themselves deny."""
    for cell in (cell for cell in series.cells if cell.state == "void"):
        reasons = [note.message for note in cell.notes if note.kind == "void"]
        why = "; ".join(dict.fromkeys(reasons)) or "no trial is good"
        yield _say("flag", series.name, f"{cell.name} counts for nothing: {why}")
    notes = [(note, cell) for cell in series.cells if cell.state != "void" for note in cell.notes]
    for kind, times in Counter(note.kind for note, _ in notes).items():
        first, cell = next((note, cell) for note, cell in notes if note.kind == kind)
        more = f" (and {log.count(times - 1, 'more cell')})" if times > 1 else ""
        yield _say("flag", series.name, f"{kind}, {cell.name}{more}: {first.message}")
    if series.lengths is None:
        return
    # total and output of one table must have the ratio of its lengths
    asked, answered = series.lengths.input, series.lengths.output
    want = (asked + answered) / answered
    ratios = [
        total / output
        for cell in series.cells
        if (total := cell.mean("total_tok_s")) and (output := cell.mean("output_tok_s"))
    ]
    if ratios and max(abs(ratio / want - 1) for ratio in ratios) > _LENGTHS_OFF:
        text = (
            "Total is {0} to {1} times output in the rows, where {2} input and {3} output tokens"
            " give {4}: not every row had these lengths."
        )
        spread, lengths = ((min(ratios), 2), (max(ratios), 2)), (_number(asked), _number(answered))
        yield _say("flag", series.name, text, *spread, *lengths, (want, 2))
    # a rate has its load from elsewhere; in conversations users think
    few = []
    for cell in (c for c in series.cells if c.concurrency and c.rate_per_s is None):
        output, ttft = cell.mean("output_tok_s"), cell.mean("ttft_ms.mean")
        tpot, under, how = cell.mean("tpot_ms.mean"), cell.mean("concurrency"), "measured"
        if under is None and output is not None and ttft is not None and tpot is not None:
            # the first token has come with TTFT
            under = output / answered * (ttft + (answered - 1) * tpot) / 1e3
            how = "by Little's law"
        if under is not None and under / (cell.concurrency or 1) < _FEW_IN_FLIGHT:
            few.append((under / (cell.concurrency or 1), under, how, cell))
    if few:
        _, under, how, cell = min(few, key=lambda each: each[0])
        text = (
            f"At concurrency {{0}} only {{1}} requests were under way on average ({how}): a lower"
            " load than its name says. Ramp-up and drain do that, and answers shorter than stated."
        )
        yield _say("flag", series.name, text, (cell.concurrency or 1, 0), (under, 0))


def _by_load(series: Series) -> list[ReportCell]:
    """Cells whose output is known; documents do not always print their rows in order."""
    good = [c for c in series.cells if c.state != "void" and c.mean("output_tok_s") is not None]
    return sorted(good, key=lambda cell: cell.concurrency or 0)


def _speeds(series: Series) -> Iterator[ReportFinding]:
    """Tokens that arrive together, the best cell, and the load beyond which it is not worth it."""
    for cell in series.cells:
        itl, tpot = cell.mean("itl_ms.mean"), cell.mean("tpot_ms.mean")
        if itl and tpot and itl / tpot > _SEVERAL_AT_ONCE:
            text = (
                "ITL is {0} times TPOT: about so many tokens arrive at once, so ITL is not the time"
                " of a token here."
            )
            yield _say("fact", series.name, text, (itl / tpot, 1))
            break
    cells = _by_load(series)
    if not cells:
        return
    best = max(cells, key=lambda cell: cell.mean("output_tok_s") or 0)
    text, numbers = "Most output: {0} tok/s", [_number(best.mean("output_tok_s") or 0)]
    parts = (
        (None if best.rate_per_s else best.concurrency, " at concurrency {%d}"),
        (best.rate_per_s, " at {%d} requests/s sent"),
        (best.mean("total_tok_s"), ", {%d} tok/s total"),
        (best.mean("user_tok_s"), "; one user then gets {%d} tok/s"),
        (best.mean("ttft_ms.mean"), " after {%d} ms until the first token"),
    )
    for value, part in parts:
        if value is not None:
            text += part % len(numbers)
            numbers.append(_number(value))
    yield _say("fact", series.name, f"{text}.", *numbers)
    if (joules := best.mean("joules_per_output_token")) is not None:
        yield _say("fact", series.name, "Energy: {0} J for each output token.", (joules, 2))
    # with a rate the load is given: there is no number of users to stay at
    is_rate = any(cell.rate_per_s for cell in series.cells)
    for low, high in [] if is_rate else pairwise(cells):
        before, after = low.mean("output_tok_s") or 0, high.mean("output_tok_s") or 0
        wait, longer = low.mean("ttft_ms.mean"), high.mean("ttft_ms.mean")
        if not (before and wait and longer and low.concurrency and high.concurrency):
            continue
        # nothing follows from trials that vary so much that they may be the same
        if not _is_apart(low, high, "ttft_ms.mean"):
            continue
        if after < before and not _is_apart(low, high, "output_tok_s"):
            continue
        if after / before - 1 < _WORTH and longer / wait > _LONGER:
            text = (
                "Stay at concurrency {0} or below: {1} changes output by {2} % and makes the first"
                " token take {3} times as long."
            )
            loads = (low.concurrency, 0), (high.concurrency, 0)
            more = ((after / before - 1) * 100, 1), (longer / wait, 1)
            yield _say("advice", series.name, text, *loads, *more)
            return


def _is_apart(one: ReportCell, other: ReportCell, name: str) -> bool:
    """Whether two cells differ by more than their trials do; a document's have none."""
    a, b = one.numbers[name], other.numbers[name]
    if a.trials is None or b.trials is None:
        return True
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.high < b.low or b.high < a.low
