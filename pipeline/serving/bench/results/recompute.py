"""The statement about a run, and its numbers computed again from its requests and samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.artifacts.attest.fields import ChangedField, changed_fields, fields_of
from pipeline.artifacts.attest.names import BENCHMARK_RUN
from pipeline.artifacts.attest.predicates import BenchmarkRun
from pipeline.artifacts.attest.statement import Moment, Statement, state_about, subject
from pipeline.core.errors import NumberChanged, RunInvalid
from pipeline.core.files import sha256_of_file
from pipeline.core.known import unknown
from pipeline.core.model import sha256_of
from pipeline.serving.bench.metrics import intervals, trial_metrics
from pipeline.serving.bench.model import OF_A_START, BenchRun, Trial
from pipeline.serving.bench.place import (
    MOST_REQUESTS_BYTES,
    REQUESTS_FILE,
    RUN_FILE,
    requests_digest,
)
from pipeline.serving.bench.plan import cells_of
from pipeline.serving.bench.record import (
    StoredRows,
    all_lines,
    read_request_rows,
    read_run,
    read_run_value,
    run_of,
    workload_digest,
)
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


def recomputed(folder: Path, run: BenchRun) -> list[RecomputedTrial]:
    """Computes every trial again, in order."""
    trials = []
    for c, cell in enumerate(run.cells):
        for t, trial in enumerate(cell.trials):
            rows = StoredRows(folder, trial.requests)
            again = trial_metrics(rows, run.workload.objectives, trial.samples)
            start = trial.metrics.model_dump(include=set(OF_A_START))
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
        starts = {trial.start for trial in cell.trials if trial.start is not None}
        # one that was stopped has more: it resumed in a further start
        if cell.state == "good" and len(starts) < run.workload.engine_starts > 1:
            of = f"the workload has {run.workload.engine_starts}"
            wrong.append(f"{name}: {len(starts)} starts of the engine, {of}")
        is_void = any(trial.void for trial in cell.trials)
        if is_void != (cell.state == "void"):
            wrong.append(f"{name}: is {cell.state}, by its trials it is not")
        reads = plan.reads.times if plan.reads else 0
        want = plan.requests * rounds + reads
        for trial in (trial for trial in cell.trials if not trial.void):
            have = trial.metrics.requests
            # there may be more: writers go on until the last read is over, and sessions have turns
            if have < want or (have > want and not reads and prompts.kind != "trace"):
                wrong.append(f"{name}, trial {trial.number}: {have} of {want} requests")
            if prompts.kind == "trace":
                # how many turns a session has is in the trace alone: gaps are found, no lost end
                turns, last = Counter[int | None](), Counter[int | None]()
                for row in read_request_rows(folder, trial.requests):
                    turns[row.conversation] += 1
                    last[row.conversation] = max(last[row.conversation], (row.turn or 0) + 1)
                if turns != last:
                    wrong.append(f"{name}, trial {trial.number}: a turn of a session is missing")
            if reads and trial.metrics.reads != reads:
                of = f"{trial.metrics.reads} of {reads} reads"
                wrong.append(f"{name}, trial {trial.number}: {of}")
            if trial.metrics.failed:
                wrong.append(f"{name}, trial {trial.number}: is not void, and requests failed")
        for lines in cell.repeated:
            rows = list(read_request_rows(folder, lines))
            loops = run.workload.looping == "void" and any(row.looping for row in rows)
            if len(rows) >= want and all(r.is_good for r in rows) and not loops:
                wrong.append(f"{name}: a trial was left out, though none of its requests failed")
    return wrong


@dataclass(frozen=True)
class RecomputedRun:
    """What the requests of a run show about what it claims."""

    trials: list[RecomputedTrial]
    changed: list[ChangedField]  # numbers of trials and intervals that do not follow

    @property
    def damaged(self) -> list[RecomputedTrial]:
        """Trials whose lines are not the ones that the run names."""
        return [trial for trial in self.trials if trial.digest != trial.named]


def recomputed_run(folder: Path, run: BenchRun) -> RecomputedRun:
    """Computes the numbers of a run again, from the requests in its folder."""
    trials = recomputed(folder, run)
    changed = [change for trial in trials for change in trial.changed]
    # intervals that do not follow from the trials, as these are computed again
    rest = iter(trials)
    for c, cell in enumerate(run.cells):
        sound_intervals = intervals([next(rest).trial for _ in cell.trials])
        now = {n: i.model_dump(mode="json") for n, i in cell.intervals.items()}
        again = {n: i.model_dump(mode="json") for n, i in sound_intervals.items()}
        changed += _changed(f"/cells/{c}/intervals", now, again)
    return RecomputedRun(trials, changed)


@dataclass(frozen=True)
class RunOnDisk:
    """The folder of a run as it is: the digests of its files, what it claims, what was found."""

    digest: str  # of the result
    requests: str | None  # the digest of the raw requests; none where they are missing
    claims: BenchRun | None = None
    invalid: str = ""  # why the result is no run
    workload: str = ""  # the digest of the workload that is part of the run
    numbers: RecomputedRun | None = None
    missing: Sequence[str] = ()  # what the run would have to hold and does not
    unreadable: str = ""  # why the numbers could not be computed again


def read_run_on_disk(folder: Path) -> RunOnDisk:
    """Reads a run whole and computes it again; an error only where there is no result at all."""
    data, value = read_run_value(folder / RUN_FILE)
    requests = requests_digest(folder, MOST_REQUESTS_BYTES)
    digest = sha256_of(data)
    try:
        run = run_of(folder / RUN_FILE, value)
    except RunInvalid as error:
        return RunOnDisk(digest, requests, invalid=str(error))
    numbers, missing, unreadable = None, list[str](), ""
    if requests is not None:
        try:
            numbers, missing = recomputed_run(folder, run), left_out(folder, run)
        except RunInvalid as error:
            unreadable = str(error)
    workload = workload_digest(run.workload)
    return RunOnDisk(digest, requests, run, "", workload, numbers, missing, unreadable)


def require_as_measured(folder: Path, run: BenchRun) -> None:
    """Refuse a run whose numbers do not follow from its requests: it is damaged or was edited."""
    found = recomputed_run(folder, run)
    if found.damaged:
        message = f"{folder}: {found.damaged[0].name}: holds other requests than the run names"
    elif missing := left_out(folder, run):
        message = f"{folder}: {missing[0]}"
    elif found.changed:
        place, now, then = found.changed[0]
        message = f"{folder / RUN_FILE}: {place} is {now}, by its requests {then}"
    else:
        return
    raise NumberChanged(
        message,
        "Get the run again from where it was made, or measure again into another --output.",
    )


def benchmark_statement(folder: Path, when: Moment | None = None) -> Statement:
    """States the run in a folder: its files as they are there, and their inputs."""
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
