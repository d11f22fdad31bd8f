"""`update.sh` against a real apt-get in folders of its own: it waits for the lock of the lists."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.testbed.packages import system_environment
from tests.testbed.playbook import ROOT

SCRIPT = ROOT / "ansible" / "roles" / "pinned_packages" / "files" / "update.sh"
pytestmark = pytest.mark.skipif(not shutil.which("apt-get"), reason="This machine has no apt.")


def update(folder: Path, limit_s: int) -> subprocess.CompletedProcess[str]:
    """One run over an apt that knows no source."""
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder,
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": "-",
    }
    command = ["/bin/sh", str(SCRIPT), str(limit_s)]
    command += [f"--option={key}={value}" for key, value in options.items()]
    return subprocess.run(
        command, env=system_environment(LC_ALL="C"), capture_output=True, text=True, check=False
    )


@contextmanager
def somebody_reading(folder: Path, seconds: float) -> Iterator[None]:
    """Another program that holds the lists as apt-daily does, for so long at most."""
    (folder / "lists").mkdir(parents=True)
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
        " print('held', flush=True); time.sleep(float(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(folder / "lists" / "lock"), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"held\n"
            yield
        finally:
            process.kill()


def test_an_apt_that_reads_the_indexes_now_is_waited_for(tmp_path: Path) -> None:
    begun = time.monotonic()
    with somebody_reading(tmp_path, 2.5):
        done = update(tmp_path, 60)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun > 2


def test_one_that_does_not_end_is_named_with_its_number_and_command(tmp_path: Path) -> None:
    with somebody_reading(tmp_path, 60):
        done = update(tmp_path, 2)
    assert done.returncode == 100
    first, *rest = done.stderr.splitlines()
    assert first.startswith("the indexes are held by: ")
    assert "fcntl.lockf" in first
    assert any("Could not get lock" in line for line in rest)


def test_another_failure_is_not_waited_for() -> None:
    begun = time.monotonic()
    command = ["/bin/sh", str(SCRIPT), "60", "--option=Dir::State::lists=/proc/none"]
    done = subprocess.run(
        command, env=system_environment(LC_ALL="C"), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "held by" not in done.stderr
    assert time.monotonic() - begun < 20
