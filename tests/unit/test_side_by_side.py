"""Tests in several processes: each counts once, whatever becomes of its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
    from tests import side_by_side

    def pytest_addoption(parser):
        side_by_side.add_option(parser)

    def pytest_runtestloop(session):
        return side_by_side.run_loop(session, lambda node: node.partition("::")[0])
"""
OF_ALL_KINDS = """
    import os, signal, warnings, pytest

    def test_sound(capsys):
        with capsys.disabled():
            print("between the dots")
    def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
    def test_wrong(): print("caught words"); assert 1 == 2
    @pytest.mark.skip(reason="none here")
    def test_skipped(): pass
    def test_warned(): warnings.warn("careful")
    def test_gone(): os._exit(3)
    def test_last(tmp_path): assert tmp_path.is_dir()
"""
WITH_AN_END = """
    import multiprocessing.util, pathlib, pytest

    @pytest.fixture(scope="session")
    def whole():
        yield
        raise OSError("no end")

    def test_begun(whole):
        pathlib.Path("folder").write_text(multiprocessing.util.get_temp_dir())
    def test_follows(whole): pass
"""
IN_A_FOLDER = """
    def test_folder(tmp_path_factory):
        with open("folders", "a") as file:
            print(tmp_path_factory.getbasetemp(), file=file)
"""
WAITING = """
    import time, pathlib, pytest

    @pytest.fixture
    def cleaned():
        yield
        time.sleep(0.2)
        pathlib.Path("cleaned").touch()

    def test_long(cleaned):
        pathlib.Path("begun").touch()
        time.sleep(60)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -n2 -ra\n")
    write(tmp_path / "conftest.py", CONFTEST)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))


def begin(project: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=project,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DEBUG_TEMPROOT": str(project),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_each_test_counts_once_also_beside_one_that_ends_its_process(project: Path) -> None:
    write(project / "test_kinds.py", OF_ALL_KINDS)
    write(project / "test_end.py", WITH_AN_END)
    process = begin(project, "--durations=3", "--durations-min=0")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    counts = "3 failed, 5 passed, 1 skipped, 1 warning, 1 error"
    assert counts in said.splitlines()[-1], said
    assert "test_kinds.py::test_killed - The process of this test ended: SIGKILL." in said
    assert "test_kinds.py::test_gone - The process of this test ended: exit code 3." in said
    # captured output, the reason of a skip, and what a session's fixture says at its end
    assert "Captured stdout call" in said
    assert "caught words" in said
    assert "SKIPPED [1] test_kinds.py:9: none here" in said
    assert "OSError: no end" in said
    assert said.count("UserWarning: careful") == 1
    assert "between the dots" not in said
    assert "slowest 3 durations" in said
    assert not Path((project / "folder").read_text()).exists()


def test_all_processes_share_one_folder_and_each_has_its_own_in_it(project: Path) -> None:
    for name in ("one", "two"):
        write(project / f"test_{name}.py", IN_A_FOLDER)
    said, _ = begin(project).communicate(timeout=120)
    one, two = map(Path, (project / "folders").read_text().splitlines())
    assert (one.parent, one != two) == (two.parent, True), said


def test_enough_failures_end_all(project: Path) -> None:
    write(project / "test_kinds.py", OF_ALL_KINDS)
    write(project / "test_long.py", WAITING)
    said, _ = begin(project, "-x").communicate(timeout=120)
    assert "stopping after 1 failures" in said
    assert "1 failed, 1 passed" in said.splitlines()[-1]


def test_ctrl_c_lets_all_clean_up(project: Path) -> None:
    write(project / "test_long.py", WAITING)
    write(project / "test_quick.py", "def test_quick(): pass")
    process = begin(project)
    while not (project / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert (project / "cleaned").exists()
