"""The tool's own wheels for a machine without a package index."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.core import proc
from pipeline.core.errors import SourceUnreachable
from pipeline.images.fetch.tool import (
    GROUPS,
    ToolTarget,
    collect_tool,
    own_python,
    pip_download,
    rounds,
    wanted_requirements,
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


def names(target: ToolTarget) -> list[str]:
    return [line.partition("==")[0] for line in wanted_requirements(LOCK, target)]


def test_conditions_are_judged_for_the_other_machine() -> None:
    assert names(AMD64) == ["one", "three"]
    assert names(ARM64) == ["one", "four"]
    (first, *_) = wanted_requirements(LOCK, AMD64)
    assert re.sub(" +", " ", first) == "one==1.0 --hash=sha256:aa --hash=sha256:bb"


def test_what_any_release_of_a_python_needs_is_collected() -> None:
    lock = (
        "a==1.0 ; python_full_version < '3.12.5' --hash=sha256:aa\n"
        "a==2.0 ; python_full_version >= '3.12.5' --hash=sha256:bb\n"
        "b==1.0 ; python_version < '3.12' --hash=sha256:cc\n"
    )
    assert [line.partition(" ")[0] for line in wanted_requirements(lock, AMD64)] == [
        "a==1.0",
        "a==2.0",
    ]


@pytest.mark.parametrize("target", [AMD64, ARM64])
def test_every_locked_package_of_the_tool_keeps_its_hashes(target: ToolTarget) -> None:
    for group in GROUPS:
        lines = list(
            wanted_requirements((ROOT / "lockfiles" / "tool" / f"{group}.txt").read_text(), target)
        )
        assert lines
        assert all(re.match(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_groups_are_downloaded_together_unless_they_locked_two_versions() -> None:
    assert rounds(["a==1 -", "b==1 -", "a==1 -"]) == [["a==1 -", "b==1 -"]]
    assert rounds(["a==1 -", "a==2 -", "b==1 -"]) == [["a==1 -", "b==1 -"], ["a==2 -"]]
    assert rounds([]) == []


def test_pip_is_asked_for_wheels_of_that_machine_alone(tmp_path: Path) -> None:
    command = pip_download(tmp_path / "r.txt", AMD64, tmp_path)
    asked = [value for word, value in pairwise(command) if word == "--platform"]
    assert "manylinux2014_x86_64" in asked
    assert all(name.endswith("_x86_64") for name in asked)
    assert command[command.index("--python-version") + 1] == "3.12.99"
    assert {"--require-hashes", "--only-binary", "--no-deps"} <= {*command}


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: int, errors: str) -> list[str]:
    """Stands for pip, and tells what it was asked for."""
    texts: list[str] = []

    def read(args: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        texts.append(Path(args[-1]).read_text())
        folder = Path(args[args.index("--dest") + 1])
        (folder / "one-1.0-py3-none-any.whl").write_bytes(b"1234")
        return subprocess.CompletedProcess(args, code, b"", errors.encode())

    monkeypatch.setattr(proc, "read", read)
    return texts


def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "lockfiles" / "tool"
    folder.mkdir(parents=True)
    for group in GROUPS:
        (folder / f"{group}.txt").write_text(LOCK)
    return tmp_path


def test_what_lies_in_the_folder_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake_pip(monkeypatch, 0, "")
    assert collect_tool(checkout(tmp_path), AMD64, tmp_path / "usb" / "tool") == (1, 4)
    assert [text.count("one==1.0") for text in asked] == [1], "groups share their packages"


def test_a_wheel_that_no_index_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, 1, "noise\nERROR: No matching distribution found for one==1.0\nmore")
    with pytest.raises(SourceUnreachable, match=r"linux/amd64 and Python 3\.12: No matching .*one"):
        collect_tool(checkout(tmp_path), AMD64, tmp_path / "tool")


@pytest.mark.parametrize("python", ["3", "2.7", "3.11.4", "3.x", "latest"])
def test_a_python_is_named_by_two_numbers(python: str) -> None:
    with pytest.raises(ValidationError):
        ToolTarget(platform="linux/amd64", python=python)
    assert ToolTarget(platform="linux/amd64", python=own_python())
