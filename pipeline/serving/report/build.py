"""From results, attempts and published tables to the data of one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline import __version__
from pipeline.serving.bench.place import RUN_FILE
from pipeline.serving.report.findings import find
from pipeline.serving.report.model import AttemptRow, Reference, ReportData, RunData
from pipeline.serving.serve.attempts import Attempt

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
    series = [each for run in runs for each in run.series]
    if not title:
        title = references[0].title if len(references) == 1 else "Published benchmarks"
        if runs:
            models = dict.fromkeys(each.model for each in series)
            title = f"Benchmark of {', '.join(models)}"
    # runs of one name get the names of their folders: a legend must tell them apart
    times, named = Counter(run.name for run in runs), []
    for run in runs:
        if times[run.name] > 1:
            name = f"{run.name} ({place_of(run)})"
            own = [each.model_copy(update={"name": name}) for each in run.series]
            run = run.model_copy(update={"name": name, "series": own})
        named.append(run)
    recipes = {each.recipe for each in series}
    data = ReportData(
        title=title,
        made=made,
        tool=TOOL,
        runs=named,
        references=list(references),
        # attempts of other recipes have nothing to do with these numbers
        attempts=[attempt_row(each) for each in attempts if each.begun.recipe in recipes],
    )
    return data.model_copy(update={"findings": find(data)})


def place_of(run: RunData) -> str:
    """The folder of a run, or the file of another program's result."""
    return run.file.removesuffix(f"/{RUN_FILE}")


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
