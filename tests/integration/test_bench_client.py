"""The load client as a user runs it: its own stub, stopped and resumed, with many streams."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.serving.bench.record import read_request_rows, read_run
from pipeline.serving.bench.self_test import measure_client, stub
from tests.perf.measure import run as run_measured

ROOT = Path(__file__).resolve().parents[2]
_HEAD = [sys.executable, "-m", "pipeline", "bench"]


def _command(port: int, out: Path, *words: str) -> list[str]:
    url = f"http://127.0.0.1:{port}"
    return [*_HEAD, url, "--no-self-test", "--output", str(out), *words]


@pytest.mark.parametrize("streams", [32, 256])
def test_the_client_measures_itself_and_says_whether_it_is_trusted(streams: int) -> None:
    test = measure_client(streams, 1)
    assert test.tokens == test.requests * round(1 / max(0.02, streams / 15_000))
    # the stub waits this long, however busy the machine is
    assert test.true_ttft_ms >= 200
    assert test.read_ttft_ms >= test.true_ttft_ms
    assert test.trusted == (abs(test.ttft_error) <= 0.02 and abs(test.tpot_error) <= 0.01)
    assert bool(test.message) != test.trusted
    assert test.ceiling_tok_s > 0


def test_a_run_that_is_stopped_is_valid_and_goes_on(tmp_path: Path) -> None:
    words = ("--concurrency", "2", "--requests", "4", "--output-tokens", "40", "--repeats", "6")
    with stub(0.05, 0.02) as (port, _):
        command = _command(port, tmp_path, *words)
        child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        # in the middle of the third trial
        next(line for line in child.stderr if "trial 3" in line)
        time.sleep(0.7)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
        assert child.returncode == 130
        partial = read_run(tmp_path / "quick")
        assert (partial.state, partial.cells[0].state) == ("partial", "partial")
        assert len(partial.cells[0].trials) == 2
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    run = read_run(tmp_path / "quick")
    assert (run.state, run.interruptions) == ("complete", 1)
    assert run.cells[0].trials[:2] == partial.cells[0].trials
    for trial in run.cells[0].trials:
        assert len(list(read_request_rows(tmp_path / "quick", trial.requests))) == 4


def test_no_process_of_the_client_outlives_it(tmp_path: Path) -> None:
    with stub(0.05, 0.5) as (port, _):
        words = ("--concurrency", "2", "--requests", "4", "--output-tokens", "200")
        child = subprocess.Popen(
            _command(port, tmp_path, *words), cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        assert child.stderr is not None
        next(line for line in child.stderr if "warming up" in line)
        time.sleep(3)
        workers = _children(child.pid)
        assert workers
        # nothing can be cleaned up after this
        child.kill()
        child.wait()
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for task in tasks for each in task.read_text(encoding="ascii").split()]


@pytest.mark.big
def test_ten_thousand_streams_are_counted_right_in_bounded_memory(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 10_100:
        pytest.skip("this machine allows too few open files")
    streams = ("--concurrency", "10000", "--requests", "10000", "--repeats", "1")
    lengths = ("--input-tokens", "60", "--output-tokens", "10")
    with stub(5.0, 0.5) as (port, _):
        cost = run_measured(
            _command(port, tmp_path, *streams, *lengths), env=dict(os.environ), cwd=ROOT
        )
    metrics = read_run(tmp_path / "quick").cells[0].trials[0].metrics
    assert (metrics.completed, metrics.failed) == (10_000, 0)
    assert metrics.output_tokens == 100_000
    assert cost.peak_bytes < 1_500_000_000
