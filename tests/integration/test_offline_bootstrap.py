"""The menu's environments from a folder of wheels alone, with a real venv and a real pip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.files import sha256_of_file
from tests.makers import make_wheel
from tests.unit.support import ROOT

MAKE = "import sys; from pathlib import Path; from pipeline.bootstrap import environment as make; "
MAKE += "print(make(Path(sys.argv[1]), 'nox'))"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose menu needs one wheel, and a folder that has it."""
    wheel = make_wheel(tmp_path / "usb" / "tool", "greeter", {"greeter.py": b"word = 'hello'\n"})
    lock = tmp_path / "lockfiles" / "tool" / "nox.txt"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"greeter==1.0 --hash={sha256_of_file(wheel)}\n")
    return tmp_path


def made(root: Path) -> subprocess.CompletedProcess[str]:
    # an index that nobody answers at: whoever asks it fails
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_CONFIG_FILE": "/dev/null"}
    command = [sys.executable, "-c", MAKE, str(root), "--mirror", str(root / "usb")]
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_an_environment_is_made_without_an_index(root: Path) -> None:
    done = made(root)
    assert done.returncode == 0, done.stderr
    python = Path(done.stdout.strip()) / "python"
    said = subprocess.run(
        [python, "-c", "import greeter; print(greeter.word)"], capture_output=True
    )
    assert said.stdout == b"hello\n"


def test_a_wheel_that_is_not_the_locked_one_is_refused_in_a_line(root: Path) -> None:
    make_wheel(root / "usb" / "tool", "greeter", {"greeter.py": b"word = 'other'\n"})
    done = made(root)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "noxfile.py: .nox/nox could not be made: " in done.stderr
    assert "image collect --tool" in done.stderr
