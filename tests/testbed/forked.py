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
from tempfile import TemporaryFile

from pipeline.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
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
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        # by their names: a child of the server does not have this process's files
        names = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        child = _FORKS.Process(target=_run, args=(words, cwd, values, *names))
        child.start()
        child.join()
        assert child.exitcode is not None
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, child.exitcode, out.read(), err.read())


def _run(words: tuple[str, ...], cwd: Path, env: dict[str, str], *outputs: str) -> None:
    for number, name in enumerate(outputs, start=1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [str(ROOT / "pipeline" / "__main__.py"), *words]
    main()
