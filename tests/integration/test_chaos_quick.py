"""A few trials of `nox -s chaos`, as a user starts it; all of them are that session's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.__main__ import CANNOT, PACKAGES
from tests.testbed.packages import CannotHave, ensure_debian_packages

ROOT = Path(__file__).resolve().parents[2]
FEW = ("--only", "weights lock", "--only", "kill-write", "--only", "full", "--only", "down")


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    if os.geteuid() != 0:
        raise CannotHave("Mounts and networks of its own need root.")
    ensure_debian_packages(PACKAGES)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", *words],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(300)
def test_one_stage_survives_a_kill_a_full_disk_and_a_lost_server(tmp_path: Path) -> None:
    child = start(tmp_path, *FEW, "--json")
    out, err = child.communicate()
    if child.returncode == CANNOT:
        pytest.skip(err)
    assert child.returncode == 0, err[-3000:]
    trials = json.loads(out)
    assert {(t["stage"], t["fault"]) for t in trials} == {
        ("weights lock", fault) for fault in ("kill-write", "full", "down")
    }
    assert {t["outcome"] for t in trials} <= {"went on", "refused", "killed"}
    assert "tried" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
def test_ctrl_c_leaves_no_mount_no_process_and_no_file(tmp_path: Path) -> None:
    child = start(tmp_path, "--only", "weights lock", "--only", "full")
    assert child.stderr is not None
    next(line for line in child.stderr if line.startswith("weights lock: "))
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    assert child.returncode == 130, err
    assert "stopped" in err
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    living = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not any(str(tmp_path).encode() in line for line in living)
