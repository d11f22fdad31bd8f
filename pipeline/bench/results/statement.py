"""The statement about a run: what stood behind it, and every value that it holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.attest.fields import fields_of
from pipeline.attest.names import BENCHMARK_RUN
from pipeline.attest.predicates import BenchmarkRun
from pipeline.attest.statement import Moment, Statement, state_about, subject
from pipeline.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.bench.record import raw_lines, read_run
from pipeline.errors import RunInvalid
from pipeline.files import sha256_of_file
from pipeline.known import unknown

# A statement has at most 16 MiB, and a run of a million requests must fit in.
_MOST_LINES = 500_000


def benchmark_statement(folder: Path, when: Moment | None = None) -> Statement:
    """What is claimed of the run in a folder, from its files as they are now."""
    run = read_run(folder)
    requests = folder / REQUESTS_FILE
    if not requests.is_file():
        raise RunInvalid(f"{requests}: is not there, and a run without its requests proves nothing")
    # short sums of the raw requests by their trial: they tell which one was changed
    spans = {
        f"/cells/{c}/trials/{t}": trial.requests
        for c, cell in enumerate(run.cells)
        for t, trial in enumerate(cell.trials)
    }
    if sum(span.lines for span in spans.values()) > _MOST_LINES:
        spans = {}
    sums = {
        place: "".join(hashlib.sha256(line).hexdigest()[:8] for line in raw_lines(folder, span))
        for place, span in spans.items()
    }
    inputs = run.inputs
    claims = BenchmarkRun(
        image=inputs.image or unknown("nothing says which image served"),
        weights=inputs.weights or unknown("nothing says which weights were served"),
        recipe=inputs.recipe or unknown("it was not served from a recipe"),
        host_facts=inputs.host or unknown("no facts of the host were given"),
        client=run.client.digest,
        workload=inputs.workload,
        outcome=run.state,
        fields=fields_of(run.model_dump(mode="json")),
        lines=sums,
    )
    subjects = [
        subject(RUN_FILE, sha256_of_file(folder / RUN_FILE)),
        subject(REQUESTS_FILE, sha256_of_file(requests)),
    ]
    return state_about(subjects, BENCHMARK_RUN, claims.model_dump(mode="json"), when)
