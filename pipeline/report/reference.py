"""Published tables that ship with this package, to be drawn beside a run of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pipeline.errors import UnknownReference
from pipeline.report.from_run import with_user_speed
from pipeline.report.model import Cell, EvidenceLink, Reference, RunData, Series
from pipeline.yaml_file import read_yaml

_FOLDER = Path(__file__).with_name("references")
_BEHIND = ("image", "weights", "recipe", "host facts", "workload", "client", "raw requests")


@cache
def all_references() -> tuple[Reference, ...]:
    """All of them, by name."""
    return tuple(_completed(read_yaml(path, Reference)) for path in sorted(_FOLDER.glob("*.yaml")))


def _completed(reference: Reference) -> Reference:
    """With what follows from the table, and what a document cannot show."""
    why = "the document names no digest of it"
    evidence = [EvidenceLink(name=name, state="unknown", message=why) for name in _BEHIND]
    series = [_with_user_speed(each) for each in reference.series]
    return reference.model_copy(update={"series": series, "evidence": evidence})


def _with_user_speed(series: Series) -> Series:
    cells: list[Cell] = [
        cell.model_copy(update={"numbers": with_user_speed(cell.numbers)}) for cell in series.cells
    ]
    return series.model_copy(update={"cells": cells})


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
