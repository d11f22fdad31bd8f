"""The statement about a run: its files by their digests, and all that it depends on."""

from __future__ import annotations

from pathlib import Path

from pipeline.artifacts.attest.names import BENCHMARK_RUN
from pipeline.artifacts.attest.predicates import BenchmarkRun
from pipeline.artifacts.attest.statement import Moment, Statement, state_about, subject
from pipeline.core.errors import RunInvalid
from pipeline.core.files import sha256_of_file
from pipeline.core.known import unknown
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.serving.bench.record import read_run


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
