"""The two sides of a comparison: a run of ours or a foreign result, brought into one form."""

from __future__ import annotations

from pathlib import Path

from pipeline.bench.foreign.model import ForeignNumber
from pipeline.bench.foreign.read import read_foreign
from pipeline.bench.marks import cell_marks
from pipeline.bench.metrics import DEFINITIONS, flat
from pipeline.bench.model import CellResult, Run
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
        if len(runs) > 1:
            names = ", ".join(run.name for run in runs)
            raise RunInvalid(f"{path}: holds {len(runs)} runs", f"Name one of them: {names}")
        run = read_run(runs[0])
        # a baseline may be kept without them; where they are, its numbers must follow
        if requests_of(runs[0]):
            require_as_measured(runs[0], run)
        return side_of(run, str(path))
    foreign = read_foreign(path)
    first, *rest = (cell.settings for cell in foreign.cells)
    # settings that all cells have alike
    shared = {k: v for k, v in first.items() if all(each.get(k) == v for each in rest)}
    cells = {
        cell.name: SideCell(
            load=f"{foreign.program} {cell.name}",
            settings={k: v for k, v in cell.settings.items() if k not in shared},
            values={n.ours: n.values for n in cell.numbers if n.ours and is_judged(n.ours)},
            others=[number for number in cell.numbers if not number.ours],
        )
        for cell in foreign.cells
    }
    name, program, digest = str(path), foreign.program, foreign.digest
    return Side(name=name, program=program, digest=digest, inputs=shared, cells=cells)


def side_of(run: Run, name: str) -> Side:
    """A run of ours."""
    known = {
        **run.inputs.model_dump(exclude_none=True),
        **{f"server.{k}": v for k, v in run.server.model_dump(exclude={"settings"}).items()},
        **{f"server.settings.{k}": v for k, v in run.server.settings.items()},
        **{f"client.{k}": v for k, v in run.client.model_dump().items()},
    }
    return Side(
        name=name,
        program=OWN,
        digest=sha256_of(run_bytes(run)),
        inputs={k: str(v) for k, v in sorted(known.items()) if v is not None},
        cells={result.cell.name: _cell(run, result) for result in run.cells},
        turns=run.turns,
    )


def _cell(run: Run, result: CellResult) -> SideCell:
    good = result.good_trials
    numbers = [flat(trial.metrics) for trial in good]
    names = [name for name in (numbers[0] if numbers else {}) if is_judged(name)]
    notes = [*cell_marks(good), *(reason for trial in result.trials for reason in trial.void)]
    # what was asked of the server; not how often, nor what it was called
    about = {"prompts", "sampling", "objectives", "limits", "seed"}
    asked = run.workload.model_dump(mode="json", include=about)
    asked["cell"] = result.cell.model_dump(mode="json")
    completed = sum(trial.metrics.completed for trial in good)
    tokens = {
        "prompt": sum(trial.metrics.input_tokens for trial in good),
        "answer": sum(trial.metrics.output_tokens for trial in good),
    }
    return SideCell(
        load=sha256_of(canonical_json(asked)),
        values={name: [each[name] for each in numbers if name in each] for name in names},
        notes=list(dict.fromkeys(notes)),
        client_limited=any(m.kind == "client-limited" for trial in good for m in trial.marks),
        # none: the server did not count
        lengths={kind: n / completed for kind, n in tokens.items() if completed and n},
    )


def is_judged(name: str) -> bool:
    """Whether more or less of it is better."""
    return DEFINITIONS[name.partition(".")[0]].better != "none"
