"""How the environments of the menu are made: from an index, or from a folder of wheels."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

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

        class Program(AbstractContextManager["Program"]):
            def __init__(
                self, command: list[str], stdout: IO[bytes], stderr: IO[bytes], env: None
            ) -> None:
                ran.append(command)
                if "venv" in command:
                    packages = Path(command[-1], "lib/python3.1/site-packages")
                    packages.mkdir(parents=True, exist_ok=True)
                    (packages / "pipeline.pth").write_text("/as/pip/writes/it\n")
                self.code = int(word in command)
                stderr.write(errors if self.code else b"")

            def __exit__(self, *_: object) -> None:
                return

            def poll(self) -> int:
                return self.code

        monkeypatch.setattr(subprocess, "Popen", Program)
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


def test_an_environment_is_made_anew_in_a_copy_of_its_checkout(
    root: Path, tmp_path: Path, ends_with: Callable[[str, bytes], Ran]
) -> None:
    """Its programs begin with the path of the original's Python."""
    ran = ends_with("nothing", b"")
    bootstrap.environment(root, "run")
    (copy := root / "copy").mkdir()
    for folder in (".nox", "lockfiles"):
        shutil.copytree(root / folder, copy / folder)
    assert bootstrap.environment(copy, "run") == copy / ".nox" / "run" / "bin"
    assert ran[3][-1] == str(copy / ".nox" / "run")
    assert ran[5][-2:] == ["-e", str(copy)]
    assert len(ran) == 6


def test_an_environment_is_made_anew_for_another_python(
    root: Path, ends_with: Callable[[str, bytes], Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = ends_with("nothing", b"")
    bootstrap.environment(root, "nox")
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    bootstrap.environment(root, "nox")
    assert len(ran) == 4


def test_our_package_is_found_by_a_path_that_is_ascii_wherever_the_checkout_is(
    root: Path, ends_with: Callable[[str, bytes], Ran]
) -> None:
    ends_with("nothing", b"")
    home = bootstrap.environment(root, "run").parent
    (file,) = home.rglob("pipeline.pth")
    assert (file.parent / file.read_text("ascii").strip()).resolve() == root.resolve()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (b"", "fetching 3 packages"),
        (b"Collecting a==1\n  Downloading a\nIgnoring b: markers\n", "fetching package 2 of 3"),
        (b"Collecting a\nInstalling collected packages: a\n", "installing 3 packages"),
    ],
)
def test_it_says_how_far_pip_is(output: bytes, said: str) -> None:
    assert bootstrap.how_far([output], 3) == said
    assert bootstrap.how_far([output], 0) == "preparing"


def test_several_pips_count_together() -> None:
    first, second = b"Collecting a\nCollecting b\n", b"Collecting c\nInstalling collected packages"
    assert bootstrap.how_far([first, second], 4) == "fetching package 3 of 4"
    assert bootstrap.how_far([second, second], 2) == "installing 2 packages"


def test_a_long_lock_is_shared_by_several_pips_and_nothing_of_it_is_lost(
    root: Path, ends_with: Callable[[str, bytes], Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [f"a{n}==1 ; python_version < '4' \\\n    --hash=sha256:{n:064}\n" for n in range(90)]
    (root / "lockfiles" / "tool" / "nox.txt").write_text("".join(blocks))
    (root / ".nox" / "nox").mkdir(parents=True)
    ran = ends_with("nothing", b"")
    given = list[str]()
    monkeypatch.setattr(bootstrap, "_run", lambda commands, *_: given.extend(lines_of(commands)))
    bootstrap.environment(root, "nox")
    assert sorted(given) == sorted("".join(blocks).splitlines())
    assert ran == []


WITH_UV = "a==1 --hash=sha256:1\nuv==2 --hash=sha256:2\nz==3 --hash=sha256:3\n"


@pytest.mark.parametrize("can_uv", [True, False])
def test_uv_installs_what_is_locked_and_pip_where_uv_cannot(
    root: Path, monkeypatch: pytest.MonkeyPatch, can_uv: bool
) -> None:
    (root / "lockfiles" / "tool" / "run.txt").write_text(WITH_UV)
    (root / ".nox" / "run").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["noxfile.py"])
    ran = list[tuple[str, str]]()

    def run(commands: list[list[str]], *_: object, **__: object) -> None:
        for command in commands:
            file = Path(command[-1]).read_text() if "-r" in command else command[-2]
            ran.append((Path(command[0]).name, file))
            if command[0].endswith("uv") and not can_uv:
                sys.exit("uv has no such index")

    monkeypatch.setattr(bootstrap, "_run", run)
    monkeypatch.setattr(bootstrap, "uv_variables", lambda _: {"UV_INDEX": "of pip"})
    bootstrap.environment(root, "run")
    (first, only_uv), (second, whole) = ran[1:3]
    assert (first, second, whole) == ("python", "uv", WITH_UV)
    assert only_uv == "uv==2 --hash=sha256:2"
    if can_uv:
        assert ran[3:] == [("uv", "-e")]
    else:
        assert ran[3:] == [("python", WITH_UV.strip()), ("python", "-e")]


def test_uv_asks_whom_pip_would_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = """[global]
index-url = https://me:secret@index/simple
extra-index-url = https://one/simple
    https://two/simple
find-links = /a /b
cert = /ca.pem
[install]
trusted-host = one
"""
    (tmp_path / "pip.conf").write_text(settings)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://of-the-environment/simple")
    monkeypatch.setenv("SSL_CERT_FILE", "/of/uv.pem")
    found = bootstrap.uv_variables(Path(sys.executable))
    assert found["UV_DEFAULT_INDEX"] == "https://of-the-environment/simple"
    assert found["UV_INDEX"] == "https://one/simple https://two/simple"
    assert found["UV_FIND_LINKS"] == "/a,/b"
    assert found["UV_INSECURE_HOST"] == "one"
    assert found["SSL_CERT_FILE"] == "/of/uv.pem", "who names it for uv means uv"
    assert found["HOME"] == os.environ["HOME"]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert bootstrap.uv_variables(Path(sys.executable)) == {}


def lines_of(commands: list[list[str]]) -> list[str]:
    files = [Path(command[-1]) for command in commands if "-r" in command]
    assert len(files) in (0, 4)
    return [line for file in files for line in file.read_text().splitlines()]


def test_the_first_pip_that_fails_ends_the_others() -> None:
    long, short = [sys.executable, "-c", "import time; time.sleep(60)"], ["false"]
    began = time.monotonic()
    with pytest.raises(SystemExit, match="exit code 1"):
        bootstrap._run([long, short], "run", "")
    assert time.monotonic() - began < 30


def test_a_program_that_takes_long_says_so_while_it_runs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_BEAT_S", 0.2)
    monkeypatch.setattr(bootstrap, "_LIVE_BEAT_S", 0.2)
    code = "import time; print('Collecting a', flush=True); time.sleep(1)"
    bootstrap._run([[sys.executable, "-c", code]], "run", "", 7)
    assert re.search(r"^  fetching package 1 of 7, \d+ s$", capfd.readouterr().err, re.M)


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 10, 2)])
def test_an_older_python_is_refused_in_words(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(
        SystemExit, match="needs Python 3.11 or newer, this is {}.{}".format(*version)
    ):
        runpy.run_path(str(ROOT / "noxfile.py"))


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
        ("-e", b"ERROR: no flit_core\n", "no flit_core"),
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
