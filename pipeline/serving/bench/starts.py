"""How long an engine takes from its start to its first token: cold, and once more."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.artifacts.attest.statement import stamp
from pipeline.core import log
from pipeline.core.errors import BenchUnanswered
from pipeline.core.files import files_below
from pipeline.serving.bench.metrics import intervals, metrics_of
from pipeline.serving.bench.model import BenchRun, Cell, CellResult, Inputs, RequestRow, Trial
from pipeline.serving.bench.plan import Planned, WorkerJob, cells_of
from pipeline.serving.bench.record import append_rows, measured_alone, write_run
from pipeline.serving.bench.runner import begun_run
from pipeline.serving.bench.server import MeasuredServer, server_facts
from pipeline.serving.bench.worker import WorkerRun
from pipeline.serving.bench.workload import Workload

_TOKENS = 8
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Started:
    """An engine that answers for the first time."""

    server: MeasuredServer
    model: str
    ready_s: float  # since the engine was started, without what our own command did before
    phases: Mapping[str, float] = field(default_factory=dict)  # by the names of metrics
    # raises where the next answer is wrong; none: nothing knows what is right
    check: Callable[[], None] | None = None
    pull_s: float | None = None  # none: its image was there
    pull_began: float = 0.0  # by `time.monotonic`


@dataclass(frozen=True)
class Starter:
    """How to start and end the engine of a recipe."""

    start: Callable[[], Started]  # until it answers
    stop: Callable[[], None]  # also where nothing runs
    weights: Path

    @property
    def again(self) -> Callable[[], MeasuredServer]:
        """Ends what runs, and starts it."""

        def restart() -> MeasuredServer:
            self.stop()
            return self.start().server

        return restart


def drop_page_cache(folder: Path) -> None:
    """Let the kernel drop its copies of the files, so that they are read from the disk again."""
    for entry in files_below(folder):
        # a cache of the Hub has links to its files
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def measure_starts(workload: Workload, starter: Starter, folder: Path, inputs: Inputs) -> BenchRun:
    """Measures every start of the workload; leaves the last engine running."""
    began, cells = stamp(), cells_of(workload)
    starts: dict[str, list[tuple[str, dict[str, float], RequestRow]]] = {c.name: [] for c in cells}
    with measured_alone(folder):
        for cell in cells:
            for number in range(workload.repeats):
                with log.step(f"{cell.name}: start {number + 1} of {workload.repeats}"):
                    starter.stop()
                    if cell.start == "cold":
                        drop_page_cache(starter.weights)
                    started, up = stamp(), starter.start()
                    origin = time.monotonic() - up.ready_s
                    # nothing is asked in between: the first token counts from the same moment
                    row = _first_answer(up, workload, cell, origin)
                    first_s = row.sent_s + (row.first_token_s or 0.0)
                    times = {"ready_s": up.ready_s, "start_to_first_token_s": first_s}
                    if up.check:
                        up.check()
                        times["start_to_right_answer_s"] = time.monotonic() - origin
                        if up.pull_s is not None:
                            times["pull_s"] = up.pull_s
                            times["pull_to_right_answer_s"] = time.monotonic() - up.pull_began
                    times = {name: round(value, 3) for name, value in times.items()}
                    starts[cell.name].append((started, {**times, **up.phases}, row))
        facts = server_facts(up.server, None)
        # only now: an earlier run in the folder stays whole as long as a start can still fail
        results, at = [], 0
        for cell in cells:
            trials = []
            for number, (started, times, row) in enumerate(starts[cell.name]):
                lines = append_rows(folder, [row], at)
                at += lines.bytes
                trials.append(
                    Trial(
                        number=number,
                        started=started,
                        metrics=metrics_of([row]).model_copy(update=times),
                        requests=lines,
                        warmup_requests=0,
                    )
                )
            spread = intervals(trials)
            results.append(CellResult(cell=cell, state="good", trials=trials, intervals=spread))
        done = {"state": "complete", "why_partial": "", "started": began, "cells": results}
        run = begun_run(workload, inputs, facts).model_copy(update=done)
        write_run(folder, run)
        return run


def _first_answer(up: Started, workload: Workload, cell: Cell, origin: float) -> RequestRow:
    body = {
        "model": up.model,
        "max_tokens": _TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "Write one sentence about the sea."}],
    }
    share = WorkerRun(
        WorkerJob(
            address=up.server.address,
            headers=dict(up.server.headers),
            model=up.model,
            workload=workload,
            cell=cell,
            requests=1,
        ),
        origin=origin,
    )
    request = share.request(Planned(0, None, _TOKENS), json.dumps(body).encode())
    try:
        asyncio.run(asyncio.wait_for(request, _LIMIT_S))
    except TimeoutError as error:
        message = f"{up.server.url}: no first answer: no whole answer within {_LIMIT_S:g} s"
        raise BenchUnanswered(message) from error
    (row,) = share.rows()
    if row.failure:
        raise BenchUnanswered(
            f"{up.server.url}: no first answer: {row.message}",
            "The server's log says why; `sm120 doctor LOG` knows many causes.",
        )
    return row
