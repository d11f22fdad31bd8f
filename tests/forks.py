"""Children of a fork server, each with a program's own arguments, variables and output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryFile


def run_in_child(
    forks: ForkServerContext,
    main: Callable[[], None],
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
) -> subprocess.CompletedProcess[str]:
    """A program's `main` to its end, as `subprocess.run` runs the command."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, TemporaryFile("w+") as code:
        # by their names: a child of the server does not have this process's files
        names = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err, code)]
        child = forks.Process(target=_run, args=(main, [*command], dict(env), cwd, *names))
        child.start()
        child.join()
        for file in (out, err, code):
            file.seek(0)
        # not `exitcode` alone: a thread that starts a child reads the codes of all others, and of
        # two that read one at a time the second gets 255
        known = code.read()
        ended = int(known) if known else child.exitcode
        assert ended is not None
        return subprocess.CompletedProcess(command, ended, out.read(), err.read())


def _run(
    main: Callable[[], None],
    command: list[str],
    env: dict[str, str],
    cwd: Path,
    out: str,
    err: str,
    code: str,
) -> None:
    os.dup2(os.open(out, os.O_WRONLY), 1)
    os.dup2(os.open(err, os.O_WRONLY), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = command
    ended: object = 0
    try:
        main()
    except SystemExit as end:
        ended = end.code or 0
    except BaseException:
        ended = 1
        raise
    finally:
        number = ended if isinstance(ended, int) else 1
        Path(code).write_text(str(number), encoding="utf-8")
