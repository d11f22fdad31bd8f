"""The tool's own wheels for a machine without a package index."""

from __future__ import annotations

import re
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError

from pipeline.core import proc
from pipeline.core.errors import SourceUnreachable
from pipeline.images.fetch.tool import (
    GROUPS,
    ToolTarget,
    collect_tool,
    own_python,
    rounds,
)
from tests.unit.support import ROOT

AMD64 = ToolTarget(platform="linux/amd64", python="3.12")
ARM64 = ToolTarget(platform="linux/arm64", python="3.11")
LOCK = """\
# made by uv
one==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
two==2.0 ; sys_platform == 'win32' \\
    --hash=sha256:cc
three==3.0 ; platform_machine == 'x86_64' \\
    --hash=sha256:dd
four==4.0 ; python_full_version < '3.12' \\
    --hash=sha256:ee
"""


class Pip:
    """Stands for pip, and keeps what it was asked for."""

    def __init__(self, code: int = 0, errors: str = "") -> None:
        self.code, self.errors = code, errors
        self.commands: list[list[str]] = []
        self.texts: list[str] = []

    def read(self, args: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.commands.append(args)
        self.texts.append(Path(args[-1]).read_text())
        folder = Path(args[args.index("--dest") + 1])
        (folder / "one-1.0-py3-none-any.whl").write_bytes(b"1234")
        return subprocess.CompletedProcess(args, self.code, b"", self.errors.encode())

    def asked(self, root: Path, target: ToolTarget) -> list[str]:
        """The requirements that are collected for a machine."""
        self.texts.clear()
        with mock.patch.object(proc, "read", self.read), tempfile.TemporaryDirectory() as folder:
            collect_tool(root, target, Path(folder))
        return [line for text in self.texts for line in text.splitlines()]


def checkout(root: Path, lock: str = LOCK) -> Path:
    folder = root / "lockfiles" / "tool"
    folder.mkdir(parents=True)
    for group in GROUPS:
        (folder / f"{group}.txt").write_text(lock)
    return root


def test_conditions_are_judged_for_the_other_machine(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    wanted = {each: Pip().asked(root, each) for each in (AMD64, ARM64)}
    names = {each: [line.partition("==")[0] for line in wanted[each]] for each in wanted}
    assert names == {AMD64: ["one", "three"], ARM64: ["one", "four"]}
    first = re.sub(" +", " ", wanted[AMD64][0])
    assert first == "one==1.0 --hash=sha256:aa --hash=sha256:bb"


def test_what_any_release_of_a_python_needs_is_collected(tmp_path: Path) -> None:
    lock = (
        "a==1.0 ; python_full_version < '3.12.5' --hash=sha256:aa\n"
        "a==2.0 ; python_full_version >= '3.12.5' --hash=sha256:bb\n"
        "b==1.0 ; python_version < '3.12' --hash=sha256:cc\n"
    )
    lines = Pip().asked(checkout(tmp_path, lock), AMD64)
    assert [line.partition(" ")[0] for line in lines] == ["a==1.0", "a==2.0"]


@pytest.mark.parametrize("target", [AMD64, ARM64])
def test_every_locked_package_of_the_tool_keeps_its_hashes(target: ToolTarget) -> None:
    lines = Pip().asked(ROOT, target)
    assert lines
    assert all(re.match(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_groups_are_downloaded_together_unless_they_locked_two_versions() -> None:
    assert rounds(["a==1 -", "b==1 -", "a==1 -"]) == [["a==1 -", "b==1 -"]]
    assert rounds(["a==1 -", "a==2 -", "b==1 -"]) == [["a==1 -", "b==1 -"], ["a==2 -"]]
    assert rounds([]) == []


def test_pip_is_asked_for_wheels_of_that_machine_alone(tmp_path: Path) -> None:
    pip = Pip()
    pip.asked(checkout(tmp_path), AMD64)
    (command,) = pip.commands
    asked = [value for word, value in pairwise(command) if word == "--platform"]
    assert "manylinux2014_x86_64" in asked
    assert all(name.endswith("_x86_64") for name in asked)
    assert command[command.index("--python-version") + 1] == "3.12.99"
    assert {"--require-hashes", "--only-binary", "--no-deps"} <= {*command}


def test_what_lies_in_the_folder_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip()
    monkeypatch.setattr(proc, "read", pip.read)
    assert collect_tool(checkout(tmp_path), AMD64, tmp_path / "usb" / "tool") == (1, 4)
    assert [text.count("one==1.0") for text in pip.texts] == [1], "groups share their packages"


def test_a_wheel_that_no_index_has_is_named(tmp_path: Path) -> None:
    pip = Pip(1, "noise\nERROR: No matching distribution found for one==1.0\nmore")
    with pytest.raises(SourceUnreachable, match=r"linux/amd64 and Python 3\.12: No matching .*one"):
        pip.asked(checkout(tmp_path), AMD64)


@pytest.mark.parametrize("python", ["3", "2.7", "3.11.4", "3.x", "latest"])
def test_a_python_is_named_by_two_numbers(python: str) -> None:
    with pytest.raises(ValidationError):
        ToolTarget(platform="linux/amd64", python=python)
    assert ToolTarget(platform="linux/amd64", python=own_python())
