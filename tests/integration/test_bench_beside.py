"""Reads beside writers, against servers whose truth is known, and against dishonest ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.core.net.wire import Address
from pipeline.serving.bench.model import BenchRun, Inputs, Trial
from pipeline.serving.bench.record import read_run, workload_digest
from pipeline.serving.bench.results.recompute import require_as_measured
from pipeline.serving.bench.runner import Bench
from pipeline.serving.bench.server import MeasuredServer
from pipeline.serving.bench.workload import Workload
from tests.testbed.paced import Paces, paced_server

_QUICK: dict[str, Any] = {"times": 2, "input": {"kind": "fixed", "tokens": 1200}, "pause_s": 0.4}
# long reads, so that a token at their border does not matter
_LONG: dict[str, Any] = {"times": 2, "input": {"kind": "fixed", "tokens": 6000}, "pause_s": 4}


def _beside(url: str, folder: Path, reads: dict[str, Any] = _QUICK, **more: Any) -> Trial:
    workload = Workload.model_validate(
        {
            "name": "beside",
            "summary": "A reader beside two writers",
            "input": {"kind": "fixed", "tokens": 60},
            "output": {"kind": "fixed", "tokens": 60},
            "loads": [{"concurrency": 2, "requests": 2, "reads": reads}],
            "warmup_requests": 0,
            "repeats": 1,
            **more,
        }
    )
    bench = Bench(
        server=MeasuredServer(Address.read(url), url),
        workload=workload,
        folder=folder,
        inputs=Inputs(workload=workload_digest(workload)),
        self_test=False,
        drain_s=0.05,
    )
    run: BenchRun = bench.run()
    assert read_run(folder) == run
    require_as_measured(folder, run)
    (cell,) = run.cells
    assert cell.cell.name == f"c2-read{reads['input']['tokens']}"
    return cell.trials[0]


def test_writers_are_slower_beside_a_read_and_nobody_is_blamed(tmp_path: Path) -> None:
    with paced_server(Paces(loaded_s=0.1, read_tok_s=2000)) as url:
        trial = _beside(url, tmp_path)
    metrics = trial.metrics
    assert trial.void == []
    assert {mark.kind for mark in trial.marks} <= {"client-unmeasured", "client-limited"}
    assert (metrics.reads, metrics.failed) == (2, 0)
    assert metrics.decode_kept is not None
    assert metrics.decode_kept < 0.5
    # the reader's latencies are no writer's
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.count == metrics.requests - 2


def test_a_server_that_stops_for_a_read_shows_its_pause(tmp_path: Path) -> None:
    with paced_server(Paces(stops=True, read_tok_s=1500)) as url:
        metrics = _beside(url, tmp_path).metrics
    assert metrics.worst_pause_ms is not None
    assert metrics.worst_pause_ms > 700
    assert metrics.decode_kept is not None
    assert metrics.decode_kept < 0.2


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("bursts", "bursts", "tokens came in bursts after pauses"),
        ("cached-beyond", "usage-disagrees", "a token count that cannot be true"),
        ("read-cached", "cache-hits", "of the prompt tokens came from a cache"),
        ("read-cut", "input-differs", "fewer tokens than asked"),
        ("bills-more", "tokens-together", "it bills more than it writes"),
    ],
)
def test_a_dishonest_server_is_marked(tmp_path: Path, fault: str, kind: str, said: str) -> None:
    with paced_server(Paces(fault=fault, read_tok_s=1200)) as url:
        # two requests are few: a machine that stands still among them may hide what a server does
        trials = (_beside(url, tmp_path / f"try-{i}") for i in range(3))
        marks = (mark for trial in trials for mark in trial.marks)
        assert any(mark.kind == kind and said in mark.message for mark in marks)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("padded", "answers with more events than tokens, which may hide a pause"),
        ("at-once", "no writer decoded while nobody read"),
        ("loops", "answers with repeated text"),
        ("read-refused", "requests failed: refused: status 400"),
    ],
)
def test_a_dishonest_server_voids_its_trial(tmp_path: Path, fault: str, said: str) -> None:
    with paced_server(Paces(fault=fault, read_tok_s=2000)) as url:
        trial = _beside(url, tmp_path)
    assert said in trial.void[0]


@pytest.mark.big
@pytest.mark.parametrize("loaded_s", [0.05, 0.1])
def test_the_truth_is_met_within_two_percent(tmp_path: Path, loaded_s: float) -> None:
    errors: list[dict[str, float]] = []
    # what else the machine does is in a reading, too: one of three must be good
    for attempt in range(3):
        with paced_server(Paces(alone_s=0.02, loaded_s=loaded_s, read_tok_s=1000)) as url:
            output = {"kind": "fixed", "tokens": 400}
            metrics = _beside(url, tmp_path / str(attempt), _LONG, output=output).metrics
        true = {
            "decode_alone_tok_s": 1 / 0.02,
            "decode_under_load_tok_s": 1 / loaded_s,
            "decode_kept": 0.02 / loaded_s,
            "read_tok_s": 1000.0,
        }
        errors.append({name: getattr(metrics, name) / value - 1 for name, value in true.items()})
        print(errors[-1])
        if all(abs(error) <= 0.02 for error in errors[-1].values()):
            return
    raise AssertionError(errors)
