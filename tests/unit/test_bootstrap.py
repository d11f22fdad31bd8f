"""How the environments of the menu are made: from an index, or from a folder of wheels."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import bootstrap
from tests.unit.support import ROOT

Ran = list[list[str]]


def test_it_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse((ROOT / "pipeline" / "bootstrap.py").read_text("utf-8"))
    froms = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert {str(name).partition(".")[0] for name in froms | names} <= sys.stdlib_module_names


@pytest.fixture
def usb(tmp_path: Path) -> Path:
    (tmp_path / "usb" / "tool").mkdir(parents=True)
    return tmp_path / "usb"


def test_a_folder_is_named_or_lies_below_the_collected_files(usb: Path) -> None:
    tool = usb / "tool"
    for arguments, variables in (
        ([], {"SM120_TOOL": str(tool)}),
        (["--offline", "--mirror", str(usb)], {}),
        ([f"--mirror={usb}"], {}),
        ([], {"SM120_MIRRORS": f"http://mirror {usb}"}),
        (["--mirror", "elsewhere"], {"SM120_TOOL": str(tool)}),
    ):
        assert bootstrap.tool_folder(arguments, variables) == tool


@pytest.mark.parametrize("words", [["--mirror"], ["--mirror", "http://a/tool"], ["x"], []])
def test_without_such_a_folder_the_index_is_asked(words: list[str], usb: Path) -> None:
    assert bootstrap.tool_folder(words, {}) is None
    (usb / "tool").rmdir()
    assert bootstrap.tool_folder(["--mirror", str(usb)], {}) is None
    assert "--no-index" not in bootstrap.pip_install(Path("python"), None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "lockfiles" / "tool").mkdir(parents=True)
    for group in ("nox", "run"):
        (tmp_path / "lockfiles" / "tool" / f"{group}.txt").write_text("thing==1.0\n")
    return tmp_path


@pytest.fixture
def ends_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], Ran]:
    """Programs are not run; the one whose arguments hold a word fails with a message."""

    def prepare(word: str, errors: bytes) -> Ran:
        ran: Ran = []

        def run(command: list[str], stderr: int, check: bool) -> subprocess.CompletedProcess[bytes]:
            ran.append(command)
            if "venv" in command:
                Path(command[-1]).mkdir(parents=True, exist_ok=True)
            failed = word in command
            return subprocess.CompletedProcess(command, int(failed), b"", errors if failed else b"")

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(sys, "argv", ["noxfile.py"])
        return ran

    return prepare


def test_a_folder_of_wheels_is_all_that_pip_sees(
    root: Path, usb: Path, ends_with: Callable[[str, bytes], Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = ends_with("nothing", b"")
    monkeypatch.setenv("SM120_TOOL", str(usb / "tool"))
    assert bootstrap.environment(root, "run") == root / ".nox" / "run" / "bin"
    venv, *installs = ran
    assert "venv" in venv
    assert len(installs) == 2, "the locked packages, then our own"
    for command in installs:
        assert command[command.index("--no-index") + 1 :][:2] == ["--find-links", f"{usb}/tool"]
    assert "--require-hashes" in installs[0]
    bootstrap.environment(root, "run")
    assert len(ran) == 3, "made once for each version of its lock"


@pytest.mark.parametrize(
    ("word", "errors", "message"),
    [
        ("--require-hashes", b"noise\nERROR: No matching distribution found for uv\n", "for uv"),
        ("--require-hashes", b"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n", "MATCH THE"),
        (
            "--require-hashes",
            b"ERROR: Exception:\nTraceback (most recent call last):\nReadTimeoutError: slow\n",
            "ReadTimeoutError: slow",
        ),
        ("--no-deps", b"ERROR: no flit_core\n", "no flit_core"),
        ("venv", b"ensurepip is not available\n", "ensurepip"),
        ("venv", b"", "exit code 1"),
    ],
)
def test_a_failure_is_a_line_and_a_hint_and_is_tried_again(
    root: Path, ends_with: Callable[[str, bytes], Ran], word: str, errors: bytes, message: str
) -> None:
    ends_with(word, errors)
    with pytest.raises(SystemExit) as ended:
        bootstrap.environment(root, "run")
    first, hint = str(ended.value.code).splitlines()
    assert first.startswith("noxfile.py: .nox/run could not be made: ")
    assert message in first
    assert ("python3-venv" if word == "venv" else "sm120 image collect --tool") in hint
    assert not (root / ".nox" / "run" / "locked").exists()


def test_a_folder_that_lacks_a_wheel_is_named(
    root: Path, usb: Path, ends_with: Callable[[str, bytes], Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_with("--require-hashes", b"ERROR: No matching distribution found for uv\n")
    monkeypatch.setenv("SM120_TOOL", str(usb / "tool"))
    with pytest.raises(SystemExit, match=f"{usb}/tool must hold"):
        bootstrap.environment(root, "nox")
