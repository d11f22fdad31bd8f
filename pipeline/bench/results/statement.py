"""The statement about a run: what stood behind it, and every value that it holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.attest.fields import fields_of
from pipeline.attest.names import BENCHMARK_RUN
from pipeline.attest.predicates import BenchmarkRun
from pipeline.attest.statement import Moment, Statement, state_about, subject
from pipeline.bench.model import Run
from pipeline.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.bench.record import read_run
from pipeline.errors import RunInvalid
from pipeline.files import sha256_of_file
from pipeline.known import Known, unknown

# a statement has at most 16 MiB, and a run of a million requests must fit in
_MOST_LINES = 500_000


def benchmark_statement(folder: Path, when: Moment | None = None) -> Statement:
    """What is claimed of the run in a folder; its files are read as they lie there."""
    run = read_run(folder)
    requests = folder / REQUESTS_FILE
    if not requests.is_file():
        raise RunInvalid(f"{requests}: is not there, and a run without its requests proves nothing")
    subjects = [
        subject(RUN_FILE, sha256_of_file(folder / RUN_FILE)),
        subject(REQUESTS_FILE, sha256_of_file(requests)),
    ]
    body = predicate(run, line_checksums(folder, run)).model_dump(mode="json")
    return state_about(subjects, BENCHMARK_RUN, body, when)


def predicate(run: Run, lines: dict[str, str]) -> BenchmarkRun:
    """The claims about a run."""
    inputs = run.inputs
    return BenchmarkRun(
        image=_known(inputs.image, "nothing says which image served"),
        weights=_known(inputs.weights, "nothing says which weights were served"),
        recipe=_known(inputs.recipe, "it was not served from a recipe"),
        host_facts=_known(inputs.host, "no facts of the host were given"),
        client=run.client.digest,
        workload=inputs.workload,
        outcome=run.state,
        fields=fields_of(run.model_dump(mode="json")),
        lines=lines,
    )


def _known(digest: str | None, why: str) -> Known[str]:
    return unknown(why) if digest is None else digest


def line_checksums(folder: Path, run: Run) -> dict[str, str]:
    """Short sums of the raw requests by their trial: they tell which one was changed."""
    trials = [
        (f"/cells/{c}/trials/{t}", trial.requests)
        for c, cell in enumerate(run.cells)
        for t, trial in enumerate(cell.trials)
    ]
    if sum(lines.lines for _, lines in trials) > _MOST_LINES:
        return {}
    sums = {}
    with (folder / REQUESTS_FILE).open("rb") as file:
        for place, lines in trials:
            file.seek(lines.first_byte)
            rows = file.read(lines.bytes).splitlines(keepends=True)
            sums[place] = "".join(hashlib.sha256(row).hexdigest()[:8] for row in rows)
    return sums
