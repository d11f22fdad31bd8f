"""Reports to test with: of the published tables, and of a small run."""

from __future__ import annotations

from pathlib import Path

from pipeline.serving.bench.metrics import intervals, metrics_of
from pipeline.serving.bench.model import BenchRun, CellResult, Mark
from pipeline.serving.bench.record import read_run
from pipeline.serving.report.build import named_reference, report_data
from pipeline.serving.report.from_run import read_run_data, run_data
from pipeline.serving.report.model import ReportData, RunData
from tests.unit.bench.example_run import FOLDER, example_rows

MADE = "2026-11-16T12:00:00Z"
DIGEST = "sha256:" + "a" * 64


def published(*names: str) -> ReportData:
    """A report of documents alone."""
    return report_data([], [named_reference(name) for name in names], [], made=MADE)


def sweep(*loads: int, marks: tuple[Mark, ...] = ()) -> BenchRun:
    """A whole run over several loads, with three trials each, none of them void."""
    run = read_run(FOLDER)
    first = run.cells[0]
    cells = []
    for load in loads:
        trials = [
            trial.model_copy(
                update={"metrics": metrics_of(example_rows(load, n)), "marks": [*marks]}
            )
            for n, trial in enumerate(first.trials)
        ]
        cell = first.cell.model_copy(update={"name": f"c{load}", "concurrency": load})
        result = {"cell": cell, "state": "good", "trials": trials, "intervals": intervals(trials)}
        cells.append(CellResult.model_validate(result))
    return run.model_copy(update={"cells": cells})


def as_data(run: BenchRun) -> RunData:
    return run_data(run, file="run/bench.json", digest=DIGEST, requests=DIGEST)


def of_example() -> ReportData:
    """A report of the example run, whose second cell is void."""
    return report_data([read_run_data(FOLDER)], [], [], made=MADE)


def example_folder() -> Path:
    return FOLDER
