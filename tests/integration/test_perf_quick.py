"""The measurements run from their first row to the last, with files of a megabyte."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.support import ROOT


def test_the_measurements_of_weights_run_whole() -> None:
    command = [sys.executable, "-m", "tests.perf", "--quick", "--only-weights"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()[2:]
    assert first.startswith("fetch ")
    assert last.startswith("verify again by receipt")
