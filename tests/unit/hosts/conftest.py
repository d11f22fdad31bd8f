"""Programs of a test's own, before the system's on the path; what a host was promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.hosts.fleet.promised import Promised
from pipeline.hosts.lock_model import write_host_lock
from pipeline.hosts.spec import HostSpec
from tests.testbed import unkillable as stuck
from tests.testbed.unkillable import CANNOT
from tests.unit.hosts.good_host import LOCK

STUCK = Path(stuck.__file__)
SPEC = HostSpec.model_validate(
    {
        "targets": ["debian-12/amd64"],
        "driver": {"branch": 595},
        "cuda": {"release": "13.2", "oldest_branches": {"13.2": 595, "13.3": 610}},
        "container_toolkit": {"at_least": "1.18.2"},
        "nccl": {"release": "2.28"},
    }
)


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


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file on the controller that the host has too."""
    path = tmp_path / "key"
    path.write_text("key")
    (tmp_path / "tiny.lock.yaml").write_text("key")
    return path


@pytest.fixture
def promised(tmp_path: Path) -> Promised:
    """A host whose lock is there to be read."""
    write_host_lock(tmp_path / "host.lock.yaml", SPEC, {"debian-12/amd64": LOCK})
    text = json.dumps(
        {
            "host": "n1",
            "lock_file": str(tmp_path / "host.lock.yaml"),
            "target": "debian-12/amd64",
            "connection": {"kind": "local", "address": ""},
        }
    )
    return Promised.model_validate_json(text)
