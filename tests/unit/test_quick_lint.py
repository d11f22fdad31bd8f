"""ansible-lint in less time: what it copies, and how the syntax is checked."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests import quick_lint
from tests.quick_lint import CHECK, Copiers, run
from tests.testbed.packages import CannotHave
from tests.testbed.playbook import ansible_program


class Word(str):
    """A string with more to it, as Ansible's are."""


def test_strings_of_any_class_stay_and_what_can_change_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy, "_deepcopy_dispatch", Copiers(copy._deepcopy_dispatch))  # type: ignore[attr-defined]
    task = {"name": Word("x"), "loop": [Word("y"), 1]}
    copied = copy.deepcopy(task)
    assert copied == task
    assert copied["name"] is task["name"]
    assert copied["loop"] is not task["loop"]


@pytest.mark.parametrize(
    ("text", "code"), [("- hosts: all\n", 0), ("- hosts: all\n  tasks: [{no_such: 1}]\n", 4)]
)
def test_a_check_of_the_syntax_answers_as_the_program_does(
    tmp_path: Path, text: str, code: int
) -> None:
    (tmp_path / "play.yml").write_text(text)
    done = checked(tmp_path / "play.yml")
    assert done.returncode == code, done.stderr
    assert ("no_such" in done.stderr) == bool(code)


def test_another_thread_may_have_read_how_a_check_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_lint._FORKS.Process, "exitcode", 255)
    (tmp_path / "play.yml").write_text("- hosts: all\n")
    assert checked(tmp_path / "play.yml").returncode == 0


def checked(play: Path) -> CompletedProcess[str]:
    try:
        ansible_program("ansible-playbook")
    except CannotHave as why:
        pytest.skip(str(why))
    return run([*CHECK, str(play)], env=dict(os.environ))
