"""What a report shows of another program's result, to be drawn beside runs of ours."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

from pipeline.bench.foreign.model import ForeignCell
from pipeline.bench.foreign.read import read_foreign
from pipeline.bench.metrics import interval
from pipeline.report.from_run import INPUTS, NUMBERS, measure_of, with_user_speed
from pipeline.report.model import Cell, EvidenceLink, Fact, Lengths, ModelRow, Note, RunData, Series

_CONCURRENCY = re.compile(r"c(\d{1,6})(?![\d.])")
_RATE = re.compile(r"r(\d{1,6}(?:\.\d+)?)$")
_MODEL = ("model", "model_id", "model_name", "model_type", "tokenizer_id")


def read_foreign_data(path: Path) -> RunData:
    """The result of another program, by its file or folder.

    Its numbers stand under the names of ours that are nearest; where they differ, a note says how.
    """
    run = read_foreign(path)
    settings = run.cells[0].settings if run.cells else {}
    model = next((settings[name] for name in _MODEL if name in settings), run.file)
    name = f"{model} ({run.program})"
    why = f"a result of {run.program} names no digest of it"
    lengths = {_lengths(cell) for cell in run.cells}
    series = Series(
        name=name,
        model=model,
        workload=f"{run.program}, {run.file}",
        lengths=lengths.pop() if len(lengths) == 1 else None,
        cells=[_cell(cell) for cell in run.cells],
    )
    return RunData(
        name=name,
        title=f"{model}, measured with {run.program}",
        file=run.file,
        digest=run.digest,
        tool=run.program,
        software=[Fact(name=key, value=value) for key, value in sorted(settings.items())],
        models=[ModelRow(name=model)],
        series=[series],
        evidence=[EvidenceLink(name=each, state="unknown", message=why) for each in INPUTS],
    )


def _lengths(cell: ForeignCell) -> Lengths | None:
    """Tokens of a request, where all had the same."""
    totals = {n.ours: fmean(n.values) for n in cell.numbers if n.ours}
    count = totals.get("completed")
    means = [totals.get(name, 0.0) / count for name in ("input_tokens", "output_tokens") if count]
    if len(means) < 2 or any(mean <= 0 or mean != int(mean) for mean in means):
        return None
    return Lengths(input=means[0], output=means[1])


def _cell(cell: ForeignCell) -> Cell:
    concurrency, rate = _CONCURRENCY.match(cell.name), _RATE.match(cell.name)
    near = {str(number.like): number for number in cell.numbers if number.like in NUMBERS}
    numbers = {name: measure_of(interval(number.values)) for name, number in near.items()}
    # how numbers differ from what their names mean for us; each difference once
    differing: dict[str, list[str]] = {}
    for number in near.values():
        if number.difference:
            differing.setdefault(number.difference, []).append(number.name)
    return Cell(
        name=cell.name,
        concurrency=int(concurrency[1]) if concurrency and int(concurrency[1]) else None,
        rate_per_s=float(rate[1]) if rate else None,
        numbers=with_user_speed(numbers),
        notes=[
            Note(kind="defined otherwise", message=f"{', '.join(names)}: {difference}")
            for difference, names in differing.items()
        ],
    )
