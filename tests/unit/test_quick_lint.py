"""ansible-lint in less time: what it copies, and how the syntax is checked."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest

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
    try:
        ansible_program("ansible-playbook")
    except CannotHave as why:
        pytest.skip(str(why))
    (tmp_path / "play.yml").write_text(text)
    done = run([*CHECK, str(tmp_path / "play.yml")], env=dict(os.environ))
    assert done.returncode == code, done.stderr
    assert ("no_such" in done.stderr) == bool(code)
