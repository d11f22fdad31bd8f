"""The smoke ladder with real parts: code in the sandbox, and an engine that nobody here wrote."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.artifacts.containers.sandbox import find_sandbox
from pipeline.serving.smoke.client import Unsound
from pipeline.serving.smoke.rungs.answers import run_in_sandbox
from tests.testbed.ports import unused_port
from tests.testbed.tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0
QUICK = ["--no-quality", "--no-tools", "--quick", "--streams", "1,2,8,16", "--json"]


@pytest.fixture(autouse=True)
def _isolated() -> None:
    if not find_sandbox().isolates:
        pytest.skip("This machine cannot run a model's code apart from everything else.")


def test_code_of_a_model_is_run_and_its_output_read() -> None:
    assert run_in_sandbox("print(sum(range(5)))") == "10\n"


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.create_connection(('127.0.0.1', 1), 1)",
        f"open({str(ROOT / 'pyproject.toml')!r}).read()",
        "raise SystemExit(3)",
        "def f(:",
    ],
)
def test_code_that_reaches_out_or_fails_is_a_failure(program: str) -> None:
    with pytest.raises(Unsound, match="the code ends with"):
        run_in_sandbox(program)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Mainline llama.cpp from its wheel, with a model of 1 MB."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("The xllamacpp wheel is not installed.")
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_gguf(folder / "tiny.gguf")
    port = unused_port()
    serve = [sys.executable, str(ROOT / "images/llama-cpp-cpu/serve.py")]
    serve += ["-m", str(folder / "tiny.gguf"), "-t", "1", "-np", "8", "-c", "16384"]
    with (folder / "log").open("wb") as out:
        engine = subprocess.Popen(
            [*serve, "--host", "127.0.0.1", "--port", str(port)], stdout=out, stderr=out
        )
        try:
            _wait_for(port, engine)
            yield f"http://127.0.0.1:{port}"
        finally:
            engine.terminate()
            engine.wait(30)


def _wait_for(port: int, engine: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and engine.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("llama.cpp did not start")


def test_nothing_wrong_is_told_about_mainline_llama_cpp(llama: str) -> None:
    command = [sys.executable, "-m", "pipeline", "smoke", llama, *QUICK]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    result = json.loads(done.stdout)
    failed = [c for r in result["rungs"] for c in r["checks"] if c["verdict"] == "failed"]
    assert failed == []
    assert (done.returncode, result["last_good"]) == (0, "memory")
