"""Interference, several starts and traces against mainline llama.cpp, a real engine.

Its model has 1 MB, so that it is quick on any machine.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.app.bench import changed_workload
from pipeline.core.net.wire import Address
from pipeline.serving.bench.model import Inputs
from pipeline.serving.bench.record import read_run, workload_digest
from pipeline.serving.bench.runner import Bench
from pipeline.serving.bench.server import MeasuredServer
from pipeline.serving.bench.workload import read_workload
from tests.testbed.llama_server import served

ROOT = Path(__file__).resolve().parents[2]
_BESIDE = """\
name: beside
summary: A reader beside two writers, for a model of 1 MB on a CPU
input: {kind: fixed, tokens: 300}
output: {kind: fixed, tokens: 200}
loads:
  - {concurrency: 2, requests: 2, reads: {times: 2, input: {kind: fixed, tokens: 3000}, pause_s: 1}}
repeats: 2
looping: mark
"""
_REPLAY = """\
name: replay
summary: One session of four turns
prompts: {kind: trace, path: trace.jsonl, block_tokens: 100}
loads:
  - {concurrency: 1, requests: 1}
warmup_requests: 0
repeats: 2
looping: mark
"""

pytestmark = [
    pytest.mark.big,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None,
        reason="The xllamacpp wheel is not installed.",
    ),
]


def _bench(url: str, workload: Path, out: Path) -> str:
    command = [sys.executable, "-m", "pipeline", "bench", url, "--workload", str(workload)]
    done = subprocess.run(
        [*command, "--output", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr + done.stdout)
    return done.stdout


def test_a_long_prompt_slows_the_writers_of_llama_cpp(tiny_model: Path, tmp_path: Path) -> None:
    workload = tmp_path / "beside.yaml"
    workload.write_text(_BESIDE)
    with served(
        tiny_model, tmp_path, ("-t", "1", "-np", "3", "-c", "24576", "-b", "512", "--metrics")
    ) as url:
        shown = _bench(url, workload, tmp_path / "out")
    run = read_run(tmp_path / "out" / "beside")
    (cell,) = run.cells
    assert cell.state == "good"
    assert "settings: total_slots 3" in shown
    for trial in cell.trials:
        metrics = trial.metrics
        assert metrics.reads == 2
        assert metrics.decode_kept is not None
        assert metrics.decode_kept < 0.9
        assert metrics.worst_pause_ms is not None
        assert metrics.itl_ms is not None
        # a step of the engine holds 512 tokens of the prompt, and every writer waits for it
        assert metrics.worst_pause_ms > 3 * metrics.itl_ms.p50


def test_several_starts_of_llama_cpp_are_one_run(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("-t", "1", "-np", "2", "-c", "8192", "--metrics")
    with ExitStack() as stack:

        def start() -> MeasuredServer:
            stack.close()  # ends the one before
            url = stack.enter_context(served(tiny_model, tmp_path, flags))
            return MeasuredServer(Address.read(url), url)

        workload = changed_workload(read_workload("tiny"), concurrency=[1], starts=2, repeats=2)
        inputs = Inputs(workload=workload_digest(workload))
        bench = Bench(start(), workload, tmp_path / "out", inputs, restart=start)
        run = bench.run()
    (cell,) = run.cells
    assert (cell.state, [trial.start for trial in cell.trials]) == ("good", [0, 1])
    assert cell.intervals["tpot_ms.mean"].trials == 2


def test_llama_cpp_finds_what_a_trace_repeats(tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        {"session_id": 0, "timestamp": n, "input_length": 200 * (n + 1), "output_length": 8}
        for n in range(4)
    ]
    lines = [{**row, "hash_ids": [*range(2 * n + 2)]} for n, row in enumerate(rows)]
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    workload = tmp_path / "replay.yaml"
    workload.write_text(_REPLAY)
    with served(tiny_model, tmp_path, ("-t", "1", "-np", "1", "-c", "8192", "--metrics")) as url:
        shown = _bench(url, workload, tmp_path / "out")
    assert "TTFT ms, turn 3-4" in shown
    (cell,) = read_run(tmp_path / "out" / "replay").cells
    metrics = cell.trials[0].metrics
    assert (cell.state, metrics.completed) == ("good", 4)
    assert metrics.repeated_share == pytest.approx(0.6)
    # a prompt that goes on from the last one is in its slot, but for the end of that
    assert metrics.cached_share is not None
    assert 0.4 < metrics.cached_share <= 0.65
