"""Who is touched when a host fails: the real playbook in check mode, this machine as three hosts.

Check mode changes nothing here, and only the role that runs first is let in.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.playbook import PLAYBOOK, ansible_environment, ansible_program, recap_of

NEVER = 10**9  # MiB that no disk has


@pytest.mark.parametrize(
    ("failing", "more", "touched"),
    [
        ("c1", {}, {"c1"}),
        ("c2", {}, {"c1", "c2"}),
        ("c2", {"sm120_max_fail_percentage": 99, "sm120_batches": [1, 2]}, {"c1", "c2", "c3"}),
    ],
    ids=["the canary", "one after it", "one after it, where that is allowed"],
)
def test_hosts_after_one_that_fails_are_not_touched(
    tmp_path: Path, failing: str, more: dict[str, Any], touched: set[str]
) -> None:
    audit = subprocess.run(["dpkg", "--audit"], capture_output=True, text=True, check=False)
    if audit.returncode:
        # since Debian 13
        pytest.skip(f"Only root can ask dpkg here: {audit.stderr.strip()[-100:]}.")
    (tmp_path / "lock.yaml").write_text("targets: {debian-12/amd64: {}}\n")
    (tmp_path / "key.gpg").write_bytes(b"key")
    hosts = {n: {"sm120_free_mib": NEVER if n == failing else 1} for n in ("c1", "c2", "c3")}
    shared = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": sys.executable,
        "sm120_parts": [],
        "sm120_lock_file": str(tmp_path / "lock.yaml"),
        "nvidia_repository_url": "http://mirror.invalid",
        "nvidia_repository_key": str(tmp_path / "key.gpg"),
    }
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps({"all": {"hosts": hosts, "vars": shared}}))
    command = [ansible_program("ansible-playbook"), "--check", "--inventory", str(inventory)]
    # whatever this machine is: the play is about the order, not about packages
    forced = {"sm120_target": "debian-12/amd64", **more}
    command += ["--extra-vars", json.dumps(forced), str(PLAYBOOK)]
    env = {**ansible_environment(), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    recap = recap_of(done.stdout)
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr
    assert set(recap) == touched, done.stdout[-2000:]
    assert {n for n, counts in recap.items() if counts["failed"]} == {failing}
    assert f"{NEVER} are needed" in done.stdout
    # a host that was let in got as far as the first role
    assert all(counts["changed"] for name, counts in recap.items() if name != failing)
