"""Published tables that ship with this package, to be drawn beside a run of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pipeline.core.errors import UnknownReference
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.report.from_run import INPUTS, with_user_speed
from pipeline.serving.report.model import EvidenceLink, Reference, RunData


@cache
def all_references() -> tuple[Reference, ...]:
    """All of them by name, with what follows from their tables and what a document cannot show."""
    why = "the document names no digest of it"
    evidence = [EvidenceLink(name=name, state="unknown", message=why) for name in INPUTS]
    references = []
    for path in sorted(Path(__file__).with_name("references").glob("*.yaml")):
        reference, series = read_yaml(path, Reference), []
        for each in reference.series:
            cells = [
                cell.model_copy(update={"numbers": with_user_speed(cell.numbers)})
                for cell in each.cells
            ]
            series.append(each.model_copy(update={"cells": cells}))
        update = {"series": series, "evidence": evidence}
        references.append(reference.model_copy(update=update))
    return tuple(references)


def named_reference(name: str) -> Reference:
    """One of them."""
    for reference in all_references():
        if reference.name == name:
            return reference
    raise UnknownReference(f"there are no reference tables named {name}")


def fitting(runs: Sequence[RunData]) -> list[Reference]:
    """Those that a run can be drawn beside: a series of theirs has a recipe or lengths of a run's.

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
