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
from typing import Any

from tests.forks import run_in_child

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
    return run_in_child(_FORKS, _check, command, options["env"], Path.cwd())


def _check() -> None:
    runpy.run_path(str(PROGRAMS / sys.argv[0]), run_name="__main__")


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
