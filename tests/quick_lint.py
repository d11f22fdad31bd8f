"""ansible-lint, whose two slow habits cost nothing here; it says the same in less time.

For each of its rules it copies every task, and most of that is copies of strings. For each playbook
and role it starts Ansible anew to check the syntax; a fork server has imported it once.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

PROGRAMS = Path(sys.executable).parent
CHECK = ["ansible-playbook", "--syntax-check"]
_FORKS = multiprocessing.get_context("forkserver")
_run = subprocess.run
# the fork server has imported this module, and each child is told to run it as its main one
warnings.filterwarnings("ignore", f".*{Path(__file__).stem}.* found in sys.modules", RuntimeWarning)


class Copiers(dict[type, Any]):
    """How `deepcopy` copies values of a class: strings and numbers, whatever their class, never."""

    def get(self, kind: type, default: Any = None) -> Any:
        if kind not in self and issubclass(kind, (str, int, float)):
            self[kind] = _itself
        return super().get(kind, default)


def _itself(value: object, _: object) -> object:
    return value


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, but for checks of the syntax: these need not start Python."""
    if [*command[:2]] != CHECK:
        return _run(command, **options)
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, TemporaryFile("w+") as code:
        # by their names: a child of the server does not have this process's files
        names = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err, code)]
        child = _FORKS.Process(target=_check, args=([*command], options["env"], *names))
        child.start()
        child.join()
        for file in (out, err, code):
            file.seek(0)
        # not `exitcode`: a thread that starts a child reads the codes of all others, and of two
        # that read one at a time the second gets 255
        ended = int(code.read() or 255)
        return subprocess.CompletedProcess(command, ended, out.read(), err.read())


def _check(command: list[str], env: dict[str, str], out: str, err: str, code: str) -> None:
    os.dup2(os.open(out, os.O_WRONLY), 1)
    os.dup2(os.open(err, os.O_WRONLY), 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    ended: object = 255
    try:
        runpy.run_path(str(PROGRAMS / command[0]), run_name="__main__")
    except SystemExit as end:
        ended = end.code or 0
    finally:
        Path(code).write_text(str(ended if isinstance(ended, int) else 1), encoding="utf-8")


if __name__ == "__main__":
    from tests import quick_lint  # by this name the fork server's children find it

    # the caller's may be non-blocking, or become so; Ansible starts with no such file
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    _FORKS.set_forkserver_preload(["ansible.cli.playbook", "tests.quick_lint"])
    copy._deepcopy_dispatch = Copiers(copy._deepcopy_dispatch)  # type: ignore[attr-defined]
    subprocess.run = quick_lint.run  # type: ignore[assignment]
    # not as a script: children would import what the main module is
    (program,) = entry_points(group="console_scripts", name="ansible-lint")
    sys.exit(program.load()())
