"""Several starts and replayed traces against servers whose truth is known, within 2 %."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pipeline.core.net.wire import Address
from pipeline.serving.bench.model import Inputs
from pipeline.serving.bench.record import workload_digest
from pipeline.serving.bench.results.compare import compare_runs, read_side
from pipeline.serving.bench.runner import Bench
from pipeline.serving.bench.server import MeasuredServer
from pipeline.serving.bench.workload import Workload
from tests.testbed.paced import Paces, paced_server

pytestmark = pytest.mark.big
# one image, by the time for a token in each of its starts
_STARTS_S = (0.020, 0.0209, 0.0204)


def measured(folder: Path, servers: Iterator[MeasuredServer], **more: Any) -> Bench:
    workload = Workload.model_validate(
        {
            "name": "small",
            "summary": "Two at a time, 60 tokens in and 100 out",
            "input": {"kind": "fixed", "tokens": 60},
            "output": {"kind": "fixed", "tokens": 100},
            "loads": [{"concurrency": 2, "requests": 4}],
            "warmup_requests": 0,
            "repeats": 3,
            **more,
        }
    )
    bench = Bench(
        server=next(servers),
        restart=lambda: next(servers),
        workload=workload,
        folder=folder,
        inputs=Inputs(workload=workload_digest(workload)),
        drain_s=0.05,
    )
    bench.run()
    return bench


def _started(stack: ExitStack, times: Iterator[float]) -> Iterator[MeasuredServer]:
    for alone_s in times:
        url = stack.enter_context(paced_server(Paces(alone_s=alone_s, read_tok_s=1000)))
        yield MeasuredServer(Address.read(url), url)


def test_the_interval_over_starts_holds_the_truth_and_one_start_does_not(tmp_path: Path) -> None:
    true_ms = 1e3 * fmean(_STARTS_S)
    with ExitStack() as stack:
        several = measured(tmp_path / "a", _started(stack, iter(_STARTS_S)), engine_starts=3)
        one = measured(tmp_path / "one", _started(stack, iter(_STARTS_S[:1])))
        other = measured(tmp_path / "other", _started(stack, iter(_STARTS_S[1:2])))
    found = several._run.cells[0].intervals["tpot_ms.mean"]
    print(found, one._run.cells[0].intervals["tpot_ms.mean"], "true", true_ms)
    assert found.mean == pytest.approx(true_ms, rel=0.02)
    assert found.low is not None
    assert found.high is not None
    assert found.low < true_ms < found.high
    # three steady trials of one start leave the truth out
    sure = one._run.cells[0].intervals["tpot_ms.mean"]
    assert sure.high is not None
    assert sure.high < true_ms
    # and two starts of this image name no winner, though each is sure of itself
    comparison = compare_runs(read_side(one.folder), read_side(other.folder))
    assert {number.verdict for _, number in comparison.numbers()} == {"undecided"}
