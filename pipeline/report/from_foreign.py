"""What a report shows of another program's result, to be drawn beside runs of ours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from pipeline.bench.foreign.model import ForeignCell, ForeignNumber, ForeignRun
from pipeline.bench.foreign.read import read_foreign
from pipeline.bench.metrics import interval
from pipeline.report.from_run import NUMBERS, with_user_speed
from pipeline.report.model import (
    Cell,
    EvidenceLink,
    Fact,
    Lengths,
    Measure,
    ModelRow,
    Note,
    RunData,
    Series,
)

_CONCURRENCY = re.compile(r"c(\d{1,6})(?![\d.])")
_RATE = re.compile(r"r(\d{1,6}(?:\.\d+)?)$")
_MODEL = ("model", "model_id", "model_name", "model_type", "tokenizer_id")
_BEHIND = ("image", "weights", "recipe", "host facts", "workload", "client", "raw requests")


def read_foreign_data(path: Path) -> RunData:
    """The result of another program, by its file or folder."""
    return foreign_data(read_foreign(path))


def foreign_data(run: ForeignRun) -> RunData:
    """Its numbers under the names of ours that are nearest; where they differ, a note says how."""
    settings = run.cells[0].settings if run.cells else {}
    model = next((settings[name] for name in _MODEL if name in settings), run.file)
    name = f"{model} ({run.program})"
    why = f"a result of {run.program} names no digest of it"
    return RunData(
        name=name,
        title=f"{model}, measured with {run.program}",
        file=run.file,
        digest=run.digest,
        tool=run.program,
        software=[Fact(name=key, value=value) for key, value in sorted(settings.items())],
        models=[ModelRow(name=model)],
        series=[_series(run, name, model)],
        evidence=[EvidenceLink(name=each, state="unknown", message=why) for each in _BEHIND],
    )


def _series(run: ForeignRun, name: str, model: str) -> Series:
    lengths = [_lengths(cell) for cell in run.cells]
    same = lengths[0] if lengths and all(each == lengths[0] for each in lengths) else None
    cells = [_cell(cell) for cell in run.cells]
    return Series(
        name=name, model=model, workload=f"{run.program}, {run.file}", lengths=same, cells=cells
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
    near = {number.like: number for number in cell.numbers if number.like in NUMBERS}
    numbers = {str(name): _measure(number) for name, number in near.items()}
    return Cell(
        name=cell.name,
        concurrency=int(concurrency[1]) if concurrency and int(concurrency[1]) else None,
        rate_per_s=float(rate[1]) if rate else None,
        numbers=with_user_speed(numbers),
        notes=_notes(near.values()),
    )


def _measure(number: ForeignNumber) -> Measure:
    return Measure.model_validate(interval(number.values).model_dump())


def _notes(numbers: Iterable[ForeignNumber]) -> list[Note]:
    """How numbers differ from what their names mean here; each difference once."""
    differing: dict[str, list[str]] = {}
    for number in numbers:
        if number.difference:
            differing.setdefault(number.difference, []).append(number.name)
    return [
        Note(kind="defined otherwise", message=f"{', '.join(names)}: {difference}")
        for difference, names in differing.items()
    ]
