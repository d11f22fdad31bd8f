"""From results, attempts and published tables to the data of one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline import __version__
from pipeline.bench.place import RUN_FILE
from pipeline.report.findings import with_findings
from pipeline.report.model import AttemptRow, Reference, ReportData, RunData, Series
from pipeline.serve.attempts import Attempt

TOOL = f"sm120-pipeline {__version__}"
# Outcomes after which nothing was wrong.
_GOOD = ("serving", "stopped", "passed")


def report_data(
    runs: Sequence[RunData],
    references: Sequence[Reference],
    attempts: Sequence[Attempt],
    *,
    made: str,
    title: str | None = None,
) -> ReportData:
    """Everything that a report shows, and what follows from it."""
    data = ReportData(
        title=title or _title(runs, references),
        made=made,
        tool=TOOL,
        runs=_told_apart(runs),
        references=list(references),
        attempts=[attempt_row(attempt) for attempt in _about(attempts, runs)],
    )
    return with_findings(data)


def _title(runs: Sequence[RunData], references: Sequence[Reference]) -> str:
    if runs:
        models = dict.fromkeys(series.model for run in runs for series in run.series)
        return f"Benchmark of {', '.join(models)}"
    return references[0].title if len(references) == 1 else "Published benchmarks"


def _told_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Runs of one name get the names of their folders: a legend must tell them apart."""
    times = Counter(run.name for run in runs)
    return [renamed(run) if times[run.name] > 1 else run for run in runs]


def place_of(run: RunData) -> str:
    """The folder of a run, or the file of another program's result."""
    return run.file.removesuffix(f"/{RUN_FILE}")


def renamed(run: RunData) -> RunData:
    """A run with its folder in its name."""
    name = f"{run.name} ({place_of(run)})"
    series: list[Series] = [each.model_copy(update={"name": name}) for each in run.series]
    return run.model_copy(update={"name": name, "series": series})


def _about(attempts: Sequence[Attempt], runs: Sequence[RunData]) -> list[Attempt]:
    """Those of the recipes that were measured."""
    recipes = {series.recipe for run in runs for series in run.series}
    return [attempt for attempt in attempts if attempt.begun.recipe in recipes]


def attempt_row(attempt: Attempt) -> AttemptRow:
    """An attempt of this machine as a line of the timeline."""
    begun = attempt.begun
    image = f"{begun.image}@{begun.image_digest[:19]}" if begun.image_digest else begun.image
    fallback = f", after {begun.after}" if begun.after else ""
    return AttemptRow(
        name=begun.id,
        at=begun.at,
        model=begun.recipe,
        configuration=f"{begun.kind}, {image or 'no image'}{fallback}",
        outcome=attempt.outcome,
        is_good=attempt.outcome in _GOOD,
        message=attempt.failure,
        seconds=attempt.seconds,
    )
