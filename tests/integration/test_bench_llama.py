"""Interference, several starts and traces against mainline llama.cpp, a real engine.

Its model has 1 MB, so that it is quick on any machine.
"""

from __future__ import annotations

import importlib.util
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
