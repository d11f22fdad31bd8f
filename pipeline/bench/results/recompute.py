"""A run's numbers, computed again from its raw requests and from what was sampled beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from pipeline.attest.fields import ChangedField, Scalar, changed_fields, fields_of
from pipeline.bench.metrics import intervals, metrics_of
from pipeline.bench.model import RequestRow, Run, Trial
from pipeline.bench.place import REQUESTS_FILE, RUN_FILE, require_plain
from pipeline.bench.plan import cells_of
from pipeline.bench.record import all_lines, read_rows
from pipeline.bench.samples import energy_j, speculated
from pipeline.bench.workload import Conversations
from pipeline.errors import NumberChanged, RunInvalid

# numbers have six digits after the point, and other machines may add up in another order
_NEAR, _NEAR_SHARE = 2e-6, 1e-12
_MOST_LINE_BYTES = 64 << 20


class RecomputedTrial(NamedTuple):
    """One trial: which of its numbers do not follow, and the lines that it was computed from."""

    place: str  # a JSON pointer
    name: str  # for people
    trial: Trial  # with the numbers as they follow
    changed: list[ChangedField]
    digest: str  # of the lines as they are now
    named: str  # their digest as the run has it
    sums: str  # eight digits of each line's hash

    @property
    def is_as_named(self) -> bool:
        return self.digest == self.named


def recomputed(folder: Path, run: Run) -> Iterator[RecomputedTrial]:
    """Every trial in order."""
    for c, cell in enumerate(run.cells):
        for t, trial in enumerate(cell.trials):
            place, name = f"/cells/{c}/trials/{t}", f"{cell.cell.name}, trial {trial.number}"
            yield _trial(folder, run, trial, place, name)


def _trial(folder: Path, run: Run, trial: Trial, place: str, name: str) -> RecomputedTrial:
    lines = _Lines(folder, trial)
    now = trial.metrics
    again = metrics_of(
        lines.rows(),
        run.workload.objectives,
        energy_j=energy_j(trial.samples.gpus),
        speculated=speculated(trial.samples.engine),
    ).model_copy(
        # of the engine's start, so that no request tells them
        update={"ready_s": now.ready_s, "start_to_first_token_s": now.start_to_first_token_s}
    )
    changed = _changed(now.model_dump(mode="json"), again.model_dump(mode="json"))
    moved = [c._replace(place=f"{place}/metrics{c.place}") for c in changed]
    digest = f"sha256:{lines.sha.hexdigest()}"
    sound = trial.model_copy(update={"metrics": again})
    return RecomputedTrial(place, name, sound, moved, digest, trial.requests.digest, lines.sums)


class _Lines:
    """The requests of a trial as they lie on the disk, hashed while they are read."""

    def __init__(self, folder: Path, trial: Trial) -> None:
        self._path, self._lines = folder / REQUESTS_FILE, trial.requests
        self.sha, self.sums = hashlib.sha256(), ""

    def rows(self) -> Iterator[RequestRow]:
        left, sums = self._lines.bytes, []
        require_plain(self._path)
        try:
            with self._path.open("rb") as file:
                file.seek(self._lines.first_byte)
                while left > 0 and (line := file.readline(min(left, _MOST_LINE_BYTES))):
                    left -= len(line)
                    self.sha.update(line)
                    sums.append(hashlib.sha256(line).hexdigest()[:8])
                    yield RequestRow.model_validate_json(line)
        except OSError as error:
            raise RunInvalid(f"{self._path}: cannot be read: {error.strerror}") from error
        except ValidationError as error:
            message = f"{self._path}: line {len(sums)} of the trial is no request"
            raise RunInvalid(f"{message}: {error.errors()[0]['msg']}") from error
        self.sums = "".join(sums)


def recomputed_intervals(run: Run, sound: Sequence[RecomputedTrial]) -> list[ChangedField]:
    """Intervals that do not follow from the trials, as these are computed again."""
    changed, trials = [], iter(sound)
    for c, cell in enumerate(run.cells):
        own = [next(trials).trial for _ in cell.trials]
        now = {n: i.model_dump(mode="json") for n, i in cell.intervals.items()}
        again = {n: i.model_dump(mode="json") for n, i in intervals(own).items()}
        place = f"/cells/{c}/intervals"
        changed += [x._replace(place=f"{place}{x.place}") for x in _changed(now, again)]
    return changed


def left_out(folder: Path, run: Run) -> list[str]:
    """What a run would have to hold and does not: lines, requests, trials or cells.

    Whoever computes the numbers again after taking out slow ones has numbers that follow; what was
    asked for says how many there must be.
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
    turns = run.workload.prompts
    rounds = len(turns.each_turn()) if isinstance(turns, Conversations) else 1
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
            rows = list(read_rows(folder, lines))
            loops = run.workload.looping == "void" and any(row.looping for row in rows)
            if len(rows) == plan.requests * rounds and all(r.is_good for r in rows) and not loops:
                wrong.append(f"{name}: a trial was left out, though none of its requests failed")
    return wrong


def require_as_measured(folder: Path, run: Run) -> None:
    """Refuse a run whose numbers do not follow from its requests: it is damaged or was edited."""
    hint = "Get the run again from where it was made, or measure again into another folder (--out)."
    trials = list(recomputed(folder, run))
    for trial in (trial for trial in trials if not trial.is_as_named):
        message = f"{folder}: {trial.name}: holds other requests than the run names"
        raise NumberChanged(message, hint)
    if missing := left_out(folder, run):
        raise NumberChanged(f"{folder}: {missing[0]}", hint)
    wrong = [change for trial in trials for change in trial.changed]
    if wrong := wrong + recomputed_intervals(run, trials):
        first = wrong[0]
        message = f"{first.place} is {first.now}, by its requests {first.then}"
        raise NumberChanged(f"{folder / RUN_FILE}: {message}", hint)


def _changed(now: object, again: object) -> list[ChangedField]:
    one, other = fields_of(now), fields_of(again)
    found = changed_fields(one, other)
    return [c for c in found if not _is_near(one.get(c.place), other.get(c.place))]


def _is_near(one: Scalar, other: Scalar) -> bool:
    if not isinstance(one, float) or not isinstance(other, float):
        return False
    return abs(one - other) <= _NEAR + abs(other) * _NEAR_SHARE
