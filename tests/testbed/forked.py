"""The command in a process of its own that need not import it: half a second less each time.

A fork server has imported all that a command may need. Tests that stop or kill a command, or ask
how a process begins, start Python anew.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.cli.main import main
from tests.forks import run_in_child

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "pipeline" / "__main__.py")
_AT_START = ("PYTHON", "LC_", "LANG", "TZ")  # variables that Python reads when it starts
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.testbed.preload"])


def run_forked(
    *words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`sm120 WORDS` to its end; `env` adds to this process's own variables."""
    values = {**os.environ, **(env or {})}
    if any(name.startswith(_AT_START) for name in env or ()):
        command = [sys.executable, "-m", "pipeline", *words]
        return subprocess.run(
            command, cwd=cwd, env=values, capture_output=True, text=True, check=False
        )
    return run_in_child(_FORKS, main, [PROGRAM, *words], values, cwd)
