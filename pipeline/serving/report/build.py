"""Makes the data of one report from results, attempts and the published tables that ship here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pipeline import __version__
from pipeline.core.errors import UnknownReference
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.bench.place import RUN_FILE
from pipeline.serving.report.findings import find_report_findings
from pipeline.serving.report.from_run import INPUTS, with_user_speed
from pipeline.serving.report.model import (
    AttemptRow,
    EvidenceLink,
    PublishedReference,
    ReportData,
    RunData,
)
from pipeline.serving.serve.attempts import Attempt

TOOL = f"sm120-pipeline {__version__}"
# Outcomes after which nothing was wrong.
_GOOD = ("serving", "stopped", "passed")


@cache
def all_references() -> tuple[PublishedReference, ...]:
    """All published tables by name, with what follows from them and what a document cannot show."""
    why = "the document names no digest of it"
    evidence = [EvidenceLink(name=name, state="unknown", message=why) for name in INPUTS]
    references = []
    for path in sorted(Path(__file__).with_name("references").glob("*.yaml")):
        reference, series = read_yaml(path, PublishedReference), []
        for each in reference.series:
            cells = [
                cell.model_copy(update={"numbers": with_user_speed(cell.numbers)})
                for cell in each.cells
            ]
            series.append(each.model_copy(update={"cells": cells}))
        update = {"series": series, "evidence": evidence}
        references.append(reference.model_copy(update=update))
    return tuple(references)


def named_reference(name: str) -> PublishedReference:
    """The published tables of this name."""
    for reference in all_references():
        if reference.name == name:
            return reference
    raise UnknownReference(f"there are no reference tables named {name}")


def fitting(runs: Sequence[RunData]) -> list[PublishedReference]:
    """The published tables to draw beside runs: a series has the recipe or lengths of a run.

    Tokens a second of another workload say nothing about this one.
    """
    series = [each for run in runs for each in run.series]
    recipes = {each.recipe for each in series if each.recipe}
    lengths = [each.lengths for each in series if each.lengths]
    return [
        reference
        for reference in all_references()
        if any(s.recipe in recipes or s.lengths in lengths for s in reference.series)
    ]


def report_data(
    runs: Sequence[RunData],
    references: Sequence[PublishedReference],
    attempts: Sequence[Attempt],
    *,
    made: str,
    title: str | None = None,
) -> ReportData:
    """Everything that a report shows, and what follows from it."""
    series = [each for run in runs for each in run.series]
    # what was measured names a report; published tables only where there is nothing else
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
    recipes, rows = {each.recipe for each in series}, []
    # attempts of other recipes have nothing to do with these numbers
    for attempt in (each for each in attempts if each.begun.recipe in recipes):
        begun = attempt.begun
        image = f"{begun.image}@{begun.image_digest[:19]}" if begun.image_digest else begun.image
        fallback = f", after {begun.after}" if begun.after else ""
        fallback += f", on {begun.host}" if begun.host else ""
        row = AttemptRow(
            name=begun.id,
            at=begun.at,
            model=begun.recipe,
            configuration=f"{begun.kind}, {image or 'no image'}{fallback}",
            outcome=attempt.outcome,
            is_good=attempt.outcome in _GOOD,
            message=attempt.failure,
            seconds=attempt.seconds,
        )
        rows.append(row)
    data = ReportData(
        title=title,
        made=made,
        tool=TOOL,
        runs=named,
        references=list(references),
        attempts=rows,
    )
    return data.model_copy(update={"findings": find_report_findings(data)})


def place_of(run: RunData) -> str:
    """The folder of a run, or the file of another program's result."""
    return run.file.removesuffix(f"/{RUN_FILE}")
