"""`sm120 bench run --dry-run`: what a benchmark would ask of a server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.bench.model import Cell
from pipeline.bench.place import RUN_FILE
from pipeline.bench.plan import cells_of
from pipeline.bench.record import read_run
from pipeline.bench.workload import Conversations, Fixed, Lengths, Workload
from pipeline.cli.context import say_json
from pipeline.errors import RunInvalid

_HEAD = ("workload", "cell", "requests", "trials", "done", "prompt tokens", "answer tokens")


def show_sweeps(target: str, workloads: Iterable[Workload], out: Path, as_json: bool) -> None:
    """Every cell of the workloads; the server is not asked, and nothing is written."""
    rows = [row for each in workloads for row in _rows(each, out / each.name)]
    if as_json:
        return say_json({"target": target, "out": str(out), "cells": rows, "dry_run": True})
    names = ("workload", "cell", "requests", "trials", "done", "input", "output")
    click.echo(log.table(_HEAD, [[row[name] for name in names] for row in rows]))
    left = sum(row["requests"] * (row["trials"] - row["done"]) for row in rows)
    click.echo(f"\n{log.count(left, 'request')}, and those that warm up each cell, to {target}")
    if starts := sum(row["trials"] for row in rows if row["starts"]):
        click.echo(f"{log.count(starts, 'start')} of the engine, which ends what is served now")
    click.echo(f"Nothing was asked; results would be in {out}")


def _rows(workload: Workload, folder: Path) -> list[dict[str, Any]]:
    done = _done(workload, folder)
    return [
        {
            "workload": workload.name,
            "cell": cell.name,
            "requests": _requests(workload, cell),
            "trials": workload.repeats,
            "starts": cell.start is not None,
            "done": min(done.get(cell.name, 0), workload.repeats),
            "input": _lengths(cell.input),
            "output": _lengths(cell.output),
        }
        for cell in cells_of(workload)
    ]


def _requests(workload: Workload, cell: Cell) -> int:
    # a conversation is a request for each of its turns
    turns = workload.prompts.each_turn() if isinstance(workload.prompts, Conversations) else [0]
    return cell.requests * len(turns)


def _done(workload: Workload, folder: Path) -> dict[str, int]:
    """The good trials of each cell, where an earlier run would be gone on with."""
    if workload.starts or not (folder / RUN_FILE).exists():
        return {}
    run = read_run(folder)
    if run.workload != workload:
        raise RunInvalid(
            f"{folder}: holds a run of another workload", "Name another folder with --out."
        )
    return {each.cell.name: len(each.good_trials) for each in run.cells}


def _lengths(lengths: Lengths | None) -> str | None:
    if lengths is None:
        return None
    return str(lengths.tokens) if isinstance(lengths, Fixed) else f"{lengths.least}–{lengths.most}"
