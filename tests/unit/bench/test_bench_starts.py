"""How long a start takes, of an engine that is a server on loopback here."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.core.errors import BenchUnanswered, SmokeFailed
from pipeline.core.net.wire import Address
from pipeline.serving.bench.model import Inputs
from pipeline.serving.bench.record import read_request_rows, read_run, workload_digest
from pipeline.serving.bench.results.recompute import require_as_measured
from pipeline.serving.bench.server import MeasuredServer
from pipeline.serving.bench.starts import Started, Starter, drop_page_cache, measure_starts
from pipeline.serving.bench.workload import read_workload
from tests.testbed.bench_faults import BenchServer, bench_server


def _starter(server: BenchServer, weights: Path, calls: list[str]) -> Starter:
    def start() -> Started:
        calls.append("start")
        return Started(MeasuredServer(Address.read(server.url), server.url), "stub", 2.5)

    return Starter(start, lambda: calls.append("stop"), weights)


def test_each_start_begins_with_nothing_running_and_ends_with_a_token(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights" * 1000)
    workload = read_workload("start")
    calls: list[str] = []
    with bench_server() as server:
        inputs = Inputs(workload=workload_digest(workload))
        run = measure_starts(workload, _starter(server, tmp_path, calls), tmp_path / "out", inputs)
    assert calls == ["stop", "start", "stop", "start"]
    assert [cell.cell.start for cell in run.cells] == ["cold", "warm"]
    metrics = run.cells[0].trials[0].metrics
    # as the engine's own start was timed, not the command around it
    assert metrics.ready_s == 2.5
    assert metrics.start_to_first_token_s is not None
    assert metrics.start_to_first_token_s > 2.5
    assert read_run(tmp_path / "out") == run
    (row,) = read_request_rows(tmp_path / "out", run.cells[1].trials[0].requests)
    assert row.chunks == 8


def test_a_right_answer_and_a_pull_have_clocks_of_their_own(tmp_path: Path) -> None:
    workload, asked = read_workload("start"), list[str]()
    with bench_server() as server:
        plain = _starter(server, tmp_path, [])

        def start() -> Started:
            began = time.monotonic() - 40.0
            check = partial(asked.append, "checked")
            return replace(plain.start(), check=check, pull_s=30.0, pull_began=began)

        inputs = Inputs(workload=workload_digest(workload))
        run = measure_starts(workload, replace(plain, start=start), tmp_path / "out", inputs)
    metrics = run.cells[0].trials[0].metrics
    assert asked == ["checked", "checked"]
    assert metrics.pull_s == 30.0
    assert metrics.pull_to_right_answer_s is not None
    assert metrics.pull_to_right_answer_s >= 40.0
    assert metrics.start_to_right_answer_s is not None
    assert 2.5 < metrics.start_to_right_answer_s < 40.0
    assert read_run(tmp_path / "out") == run
    require_as_measured(tmp_path / "out", run)


def test_a_check_that_fails_leaves_no_run(tmp_path: Path) -> None:
    workload = read_workload("start")
    with bench_server() as server:
        plain = _starter(server, tmp_path, [])

        def wrong() -> None:
            raise SmokeFailed("its first answer is wrong")

        def start() -> Started:
            return replace(plain.start(), check=wrong)

        inputs = Inputs(workload=workload_digest(workload))
        with pytest.raises(SmokeFailed):
            measure_starts(workload, replace(plain, start=start), tmp_path / "out", inputs)
    assert not (tmp_path / "out" / "bench.json").exists()


@pytest.mark.parametrize("fault", ["always-busy", "not-http", "empty"])
def test_a_start_without_a_first_token_is_none(tmp_path: Path, fault: str) -> None:
    workload = read_workload("start")
    inputs = Inputs(workload=workload_digest(workload))
    with bench_server(fault) as server:
        # the faults of single requests are of the second
        server.world.requests = 1
        starter = _starter(server, tmp_path, [])
        with pytest.raises(BenchUnanswered):
            measure_starts(workload, starter, tmp_path / "out", inputs)


def test_a_start_that_fails_leaves_the_run_before_it_whole(tmp_path: Path) -> None:
    workload = read_workload("start")
    inputs = Inputs(workload=workload_digest(workload))
    with bench_server() as server:
        starter = _starter(server, tmp_path, [])
        measure_starts(workload, starter, tmp_path / "out", inputs)
        before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        # the first of the two is good
        server.world.fault, server.world.requests = "empty", 0
        with pytest.raises(BenchUnanswered):
            measure_starts(workload, starter, tmp_path / "out", inputs)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_files_are_forgotten_and_stay_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "part").write_bytes(b"bytes")
    drop_page_cache(tmp_path)
    assert (tmp_path / "deep" / "part").read_bytes() == b"bytes"
