"""The client measures itself first: against a stub on this machine, whose pacing is known."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.core import proc
from pipeline.core.errors import BenchNotMeasured
from pipeline.core.files import cores
from pipeline.core.net.wire import Address
from pipeline.serving.bench.metrics import metrics_of
from pipeline.serving.bench.model import SelfTest
from pipeline.serving.bench.plan import WorkerJob, cells_of
from pipeline.serving.bench.stub import MODEL
from pipeline.serving.bench.workers import Workers, start_module
from pipeline.serving.bench.workload import Fixed, Load, RequestLimits, Workload

# What a reading may be off by before it is not trusted.
MOST_TTFT_ERROR, MOST_TPOT_ERROR = 0.02, 0.01
# A worker that uses more of its core reads late: the ceiling is stated for this share.
USABLE_SHARE = 0.6
_TTFT_S = 0.2
_FASTEST_TPOT_S = 0.02
# The stub has to keep up as well, on the same machine.
_OFFERED_TOK_S = 15_000
_SECONDS = 1.0
_FEWEST_TOKENS, _FEWEST_REQUESTS = 10, 4


@contextmanager
def stub(ttft_s: float, tpot_s: float) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Runs the stub in its own process; yields its port and the process that `truth` asks."""
    process = start_module("pipeline.serving.bench.stub", str(ttft_s), str(tpot_s))
    try:
        yield int(_read(process)["port"]), process
    finally:
        proc.end(process)


def _read(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchNotMeasured("the stub that the client measures itself against did not start")
    return json.loads(line)


def truth(process: subprocess.Popen[bytes]) -> Any:
    """Asks the stub what it did since the last time."""
    proc.send_line(process, b"")
    return _read(process)


def measure_client(concurrency: int, workers: int) -> SelfTest:
    """Runs one test with so many streams and workers."""
    tpot_s = max(_FASTEST_TPOT_S, concurrency / _OFFERED_TOK_S)
    tokens = max(_FEWEST_TOKENS, round(_SECONDS / tpot_s))
    requests = max(_FEWEST_REQUESTS, 2 * concurrency)
    workload = Workload(
        name="self-test",
        summary="Streams of a stub whose pacing is known",
        input=Fixed(tokens=100),
        output=Fixed(tokens=tokens),
        loads=[Load(concurrency=concurrency, requests=requests)],
        limits=RequestLimits(first_token_s=60, stall_s=30, request_s=120),
    )
    (cell,) = cells_of(workload)
    with stub(_TTFT_S, tpot_s) as (port, process):
        job = WorkerJob(
            address=Address("127.0.0.1", port, is_tls=False, base=""),
            model=MODEL,
            workload=workload,
            cell=cell,
            requests=requests,
            workers=workers,
            # engines answer one after the other, not all in one moment
            ramp_s=_TTFT_S + tokens * tpot_s,
        )
        with Workers([job.model_copy(update={"worker": n}) for n in range(workers)]) as running:
            metrics = metrics_of(running.rows())
        true = truth(process)
    if metrics.failed or metrics.ttft_ms is None or metrics.tpot_ms is None:
        raise BenchNotMeasured(
            f"the client lost {metrics.failed} of {metrics.requests} streams of its own stub",
            "Ask for fewer streams, or free this machine.",
        )
    ttft, tpot = metrics.ttft_ms.mean, metrics.tpot_ms.mean
    ttft_error, tpot_error = ttft / true["ttft_ms"] - 1, tpot / true["tpot_ms"] - 1
    per_token = sum(effort.cpu_s for effort in running.efforts) / max(1, metrics.output_tokens)
    is_good = abs(ttft_error) <= MOST_TTFT_ERROR and abs(tpot_error) <= MOST_TPOT_ERROR
    too_much = (
        f"it reads TTFT {ttft_error:+.1%} and TPOT {tpot_error:+.1%} wrong here; within"
        f" {MOST_TTFT_ERROR:.0%} and {MOST_TPOT_ERROR:.0%} it is trusted"
    )
    return SelfTest(
        concurrency=concurrency,
        workers=workers,
        requests=metrics.requests,
        tokens=metrics.output_tokens,
        true_ttft_ms=round(true["ttft_ms"], 3),
        true_tpot_ms=round(true["tpot_ms"], 4),
        read_ttft_ms=round(ttft, 3),
        read_tpot_ms=round(tpot, 4),
        ttft_error=round(ttft_error, 5),
        tpot_error=round(tpot_error, 5),
        offered_tok_s=round(concurrency / tpot_s, 1),
        ceiling_tok_s=round(min(workers, cores()) * USABLE_SHARE / per_token, 1),
        cpu_us_per_token=round(per_token * 1e6, 2),
        trusted=is_good,
        message="" if is_good else too_much,
    )


def measure_self(concurrency: int, workers: int | None) -> SelfTest:
    """Tests the client with as many workers as it takes, up to one a core; or as many as asked."""

    def error(test: SelfTest) -> float:
        return max(abs(test.ttft_error) / MOST_TTFT_ERROR, abs(test.tpot_error) / MOST_TPOT_ERROR)

    best, count = measure_client(concurrency, workers or 1), 2
    while not workers and not best.trusted and count <= min(cores(), concurrency):
        tried = measure_client(concurrency, count)
        if tried.trusted or error(tried) < error(best):
            best = tried
        count *= 2
    return best
