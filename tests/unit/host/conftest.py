"""Programs of a test's own, before the system's on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed import unkillable as stuck
from tests.testbed.unkillable import CANNOT

STUCK = Path(stuck.__file__)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, before the system's own on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def unkillable(programs: Path) -> str:
    """`nvidia-smi` under a driver that hangs: it answers nothing and cannot be killed."""
    path = programs / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} {STUCK}\n")
    path.chmod(0o755)
    if subprocess.run([sys.executable, STUCK, "--try"], check=False).returncode == CANNOT:
        pytest.skip("This machine lets no process trace another.")
    return str(path)
