"""What is compared: a run of ours or a foreign result, brought into one form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.bench.foreign.model import ForeignCell, ForeignNumber
from pipeline.bench.foreign.read import read_foreign
from pipeline.bench.marks import cell_marks
from pipeline.bench.metrics import DEFINITIONS, flat
from pipeline.bench.model import CellResult, Metrics, Run
from pipeline.bench.place import requests_of, runs_in
from pipeline.bench.record import read_run, run_bytes
from pipeline.bench.results.recompute import require_as_measured
from pipeline.errors import RunInvalid
from pipeline.model import Digest, Frozen, canonical_json, sha256_of

OWN = "sm120 bench"


class SideCell(Frozen):
    """One cell: the values of each number, one for each trial that counts."""

    load: str  # equal only for equal loads
    settings: dict[str, str] = {}
    values: dict[str, list[float]]
    notes: list[str] = []
    client_limited: bool = False
    # what the server counted in a request on average, whatever was asked for
    lengths: dict[str, float] = {}
    others: list[ForeignNumber] = []  # numbers that are defined in another way than ours

    def nearest(self) -> dict[str, ForeignNumber]:
        """Every number by the metric of ours that it is nearest to."""
        own = {
            name: ForeignNumber(name=name, unit="", values=values, like=name)
            for name, values in self.values.items()
        }
        near = {n.like: n for n in self.others if n.like and is_judged(n.like)}
        return {**near, **own}


class Side(Frozen):
    """One of two results."""

    name: str
    program: str
    digest: Digest
    inputs: dict[str, str]
    cells: dict[str, SideCell]
    turns: str = ""  # the same for two runs whose trials were measured in turns


def read_side(path: Path) -> Side:
    """A run by its folder or file, or the result of another program."""
    if runs := runs_in(path):
        folder = only_run(path, runs)
        run = read_run(folder)
        # a baseline may be kept without them; where they are, its numbers must follow
        if requests_of(folder):
            require_as_measured(folder, run)
        return side_of(run, str(path))
    foreign = read_foreign(path)
    shared = _common([cell.settings for cell in foreign.cells])
    cells = {cell.name: _foreign_cell(cell, shared, foreign.program) for cell in foreign.cells}
    return Side(
        name=str(path), program=foreign.program, digest=foreign.digest, inputs=shared, cells=cells
    )


def only_run(path: Path, runs: Sequence[Path]) -> Path:
    """The one run of a folder; of several, somebody must say which."""
    if len(runs) == 1:
        return runs[0]
    names = ", ".join(run.name for run in runs)
    raise RunInvalid(f"{path}: holds {len(runs)} runs", f"Name one of them: {names}")


def _common(settings: Sequence[dict[str, str]]) -> dict[str, str]:
    """Settings that all cells have alike."""
    first, *rest = settings
    return {k: v for k, v in first.items() if all(each.get(k) == v for each in rest)}


def _foreign_cell(cell: ForeignCell, shared: dict[str, str], program: str) -> SideCell:
    own = {k: v for k, v in cell.settings.items() if k not in shared}
    values = {n.ours: n.values for n in cell.numbers if n.ours and is_judged(n.ours)}
    others = [number for number in cell.numbers if not number.ours]
    return SideCell(load=f"{program} {cell.name}", settings=own, values=values, others=others)


def side_of(run: Run, name: str) -> Side:
    """A run of ours."""
    return Side(
        name=name,
        program=OWN,
        digest=sha256_of(run_bytes(run)),
        inputs=_inputs(run),
        cells={result.cell.name: _cell(run, result) for result in run.cells},
        turns=run.turns,
    )


def _inputs(run: Run) -> dict[str, str]:
    known = {
        **run.inputs.model_dump(exclude_none=True),
        **{f"server.{k}": v for k, v in run.server.model_dump(exclude={"settings"}).items()},
        **{f"server.settings.{k}": v for k, v in run.server.settings.items()},
        **{f"client.{k}": v for k, v in run.client.model_dump().items()},
    }
    return {k: str(v) for k, v in sorted(known.items()) if v is not None}


def _cell(run: Run, result: CellResult) -> SideCell:
    good = result.good_trials
    numbers = [flat(trial.metrics) for trial in good]
    names = [name for name in (numbers[0] if numbers else {}) if is_judged(name)]
    marks = [mark for trial in good for mark in trial.marks]
    notes = [*cell_marks(good), *(reason for trial in result.trials for reason in trial.void)]
    return SideCell(
        load=_load(run, result),
        values={name: [each[name] for each in numbers if name in each] for name in names},
        notes=list(dict.fromkeys(notes)),
        client_limited=any(mark.kind == "client-limited" for mark in marks),
        lengths=_lengths([trial.metrics for trial in good]),
    )


def _lengths(trials: Sequence[Metrics]) -> dict[str, float]:
    completed = sum(each.completed for each in trials)
    # none: the server did not count
    tokens = {
        "prompt": sum(each.input_tokens for each in trials),
        "answer": sum(each.output_tokens for each in trials),
    }
    return {kind: count / completed for kind, count in tokens.items() if completed and count}


def is_judged(name: str) -> bool:
    """Whether more or less of it is better."""
    return DEFINITIONS[name.partition(".")[0]].better != "none"


def _load(run: Run, result: CellResult) -> str:
    """What was asked of the server; not how often, nor what it was called."""
    asked = run.workload.model_dump(
        mode="json", include={"prompts", "sampling", "objectives", "limits", "seed"}
    )
    return sha256_of(canonical_json({**asked, "cell": result.cell.model_dump(mode="json")}))
