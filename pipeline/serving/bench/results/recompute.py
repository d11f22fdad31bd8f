"""The statement about a run, and its numbers computed again from its requests and samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.artifacts.attest.fields import ChangedField, changed_fields, fields_of
from pipeline.artifacts.attest.names import BENCHMARK_RUN
from pipeline.artifacts.attest.predicates import BenchmarkRun
from pipeline.artifacts.attest.statement import Moment, Statement, state_about, subject
from pipeline.core.errors import NumberChanged, RunInvalid
from pipeline.core.files import sha256_of_file
from pipeline.core.known import unknown
from pipeline.serving.bench.metrics import intervals, trial_metrics
from pipeline.serving.bench.model import BenchRun, Trial
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.serving.bench.plan import cells_of
from pipeline.serving.bench.record import StoredRows, all_lines, read_request_rows, read_run
from pipeline.serving.bench.workload import Conversations

_NEAR = 2e-6  # numbers have six digits after the point


class RecomputedTrial(NamedTuple):
    """One trial: which of its numbers do not follow, and the lines that it was computed from."""

    place: str  # a JSON pointer
    name: str  # for people
    trial: Trial  # with the numbers as they follow
    changed: list[ChangedField]
    digest: str  # of the lines as they are now
    named: str  # their digest as the run has it

    @property
    def is_as_named(self) -> bool:
        return self.digest == self.named


def recomputed(folder: Path, run: BenchRun) -> list[RecomputedTrial]:
    """Every trial in order."""
    trials = []
    for c, cell in enumerate(run.cells):
        for t, trial in enumerate(cell.trials):
            rows = StoredRows(folder, trial.requests)
            again = trial_metrics(rows, run.workload.objectives, trial.samples)
            # of the engine's start, so that no request tells them
            start = trial.metrics.model_dump(include={"ready_s", "start_to_first_token_s"})
            again = again.model_copy(update=start)
            numbers = trial.metrics.model_dump(mode="json"), again.model_dump(mode="json")
            place = f"/cells/{c}/trials/{t}"
            trials.append(
                RecomputedTrial(
                    place=place,
                    name=f"{cell.cell.name}, trial {trial.number}",
                    trial=trial.model_copy(update={"metrics": again}),
                    changed=_changed(f"{place}/metrics", *numbers),
                    digest=rows.digest,
                    named=trial.requests.digest,
                )
            )
    return trials


def recomputed_intervals(run: BenchRun, sound: Sequence[RecomputedTrial]) -> list[ChangedField]:
    """Intervals that do not follow from the trials, as these are computed again."""
    changed, trials = [], iter(sound)
    for c, cell in enumerate(run.cells):
        sound_intervals = intervals([next(trials).trial for _ in cell.trials])
        now = {n: i.model_dump(mode="json") for n, i in cell.intervals.items()}
        again = {n: i.model_dump(mode="json") for n, i in sound_intervals.items()}
        changed += _changed(f"/cells/{c}/intervals", now, again)
    return changed


def _changed(place: str, now: object, again: object) -> list[ChangedField]:
    """Fields below a place that do not follow; other machines may add up in another order."""
    one, other = fields_of(now), fields_of(again)
    found = []
    for change in changed_fields(one, other):
        a, b = one.get(change.place), other.get(change.place)
        if isinstance(a, float) and isinstance(b, float) and abs(a - b) <= _NEAR + abs(b) * 1e-12:
            continue
        found.append(change._replace(place=f"{place}{change.place}"))
    return found


def left_out(folder: Path, run: BenchRun) -> list[str]:
    """What a run would have to hold and does not: lines, requests, trials or cells.

    After an edit that takes out slow requests, the remaining numbers may follow from the rest; the
    workload says how many requests there must be.
    """
    wrong, at, path = [], 0, folder / REQUESTS_FILE
    for lines in all_lines(run):
        if lines.first_byte != at:
            wrong.append(f"{path}: no trial names the bytes {at} to {lines.first_byte}")
        at = lines.first_byte + lines.bytes
    if (size := path.stat().st_size) != at:
        wrong.append(f"{path}: has {size} bytes, the run names {at} of them")
    asked = cells_of(run.workload)
    if run.state == "complete" and len(run.cells) != len(asked):
        wrong.append(f"{len(run.cells)} cells, the workload has {len(asked)}")
    prompts = run.workload.prompts
    rounds = len(prompts.each_turn()) if isinstance(prompts, Conversations) else 1
    for cell, plan in zip(run.cells, asked, strict=False):
        name, repeats = cell.cell.name, run.workload.repeats
        if cell.cell.requests != plan.requests:
            wrong.append(f"{name}: {cell.cell.requests} requests, the workload has {plan.requests}")
        if cell.state == "good" and len(cell.trials) != repeats:
            wrong.append(f"{name}: {len(cell.trials)} trials, the workload has {repeats}")
        is_void = any(trial.void for trial in cell.trials)
        if is_void != (cell.state == "void"):
            wrong.append(f"{name}: is {cell.state}, by its trials it is not")
        for trial in (trial for trial in cell.trials if not trial.void):
            have, want = trial.metrics.requests, plan.requests * rounds
            if have != want:
                wrong.append(f"{name}, trial {trial.number}: {have} of {want} requests")
            if trial.metrics.failed:
                wrong.append(f"{name}, trial {trial.number}: is not void, and requests failed")
        for lines in cell.repeated:
            rows = list(read_request_rows(folder, lines))
            loops = run.workload.looping == "void" and any(row.looping for row in rows)
            if len(rows) == plan.requests * rounds and all(r.is_good for r in rows) and not loops:
                wrong.append(f"{name}: a trial was left out, though none of its requests failed")
    return wrong


def require_as_measured(folder: Path, run: BenchRun) -> None:
    """Refuse a run whose numbers do not follow from its requests: it is damaged or was edited."""
    trials = recomputed(folder, run)
    changed = [change for trial in trials for change in trial.changed]
    if damaged := [trial.name for trial in trials if not trial.is_as_named]:
        message = f"{folder}: {damaged[0]}: holds other requests than the run names"
    elif missing := left_out(folder, run):
        message = f"{folder}: {missing[0]}"
    elif changed := changed + recomputed_intervals(run, trials):
        place, now, then = changed[0]
        message = f"{folder / RUN_FILE}: {place} is {now}, by its requests {then}"
    else:
        return
    raise NumberChanged(
        message,
        "Get the run again from where it was made, or measure again into another --output.",
    )


def benchmark_statement(folder: Path, when: Moment | None = None) -> Statement:
    """What is claimed of the run in a folder: its files as they are there, and their inputs."""
    run = read_run(folder)
    requests = folder / REQUESTS_FILE
    if not requests.is_file():
        raise RunInvalid(f"{requests}: is not there, and a run without its requests proves nothing")
    named = (RUN_FILE, REQUESTS_FILE)
    subjects = [subject(name, sha256_of_file(folder / name)) for name in named]
    inputs = run.inputs
    claims = BenchmarkRun(
        image=inputs.image or unknown("nothing says which image served"),
        weights=inputs.weights or unknown("nothing says which weights were served"),
        recipe=inputs.recipe or unknown("it was not served from a recipe"),
        host_facts=inputs.host or unknown("no facts of the host were given"),
        client=run.client.digest,
        workload=inputs.workload,
        outcome=run.state,
    )
    body = claims.model_dump(mode="json", exclude_unset=True)
    return state_about(subjects, BENCHMARK_RUN, body, when)
