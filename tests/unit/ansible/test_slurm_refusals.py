"""What the role slurm refuses before it changes anything, on hosts that are this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.playbook import ROOT, ansible_environment, ansible_program

KEY = "0123456789abcdef" * 4


def refused(tmp: Path, task: str, programs: dict[str, str], **host_values: Any) -> str:
    """What Ansible says of the role's tasks on two hosts, with stand-ins for programs."""
    folder = tmp / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {name: {**local} for name in ("n1", "n2")}
    for name, values in host_values.items():
        hosts[name] |= values
    shared = {"slurm_head": "n1", "slurm_munge_key": KEY, "ansible_become": False}
    inventory, play = tmp / "hosts.json", tmp / "play.json"
    inventory.write_text(json.dumps({"all": {"hosts": hosts, "vars": shared}}))
    tasks = [{"include_role": {"name": "slurm", "tasks_from": task}}]
    play.write_text(
        json.dumps(
            [{"hosts": "all", "gather_facts": False, "any_errors_fatal": True, "tasks": tasks}]
        )
    )
    command = [ansible_program("ansible-playbook"), "--check", "-i", str(inventory), str(play)]
    environment = ansible_environment()
    environment |= {"PATH": f"{folder}:{environment['PATH']}", "HOME": str(tmp)}
    environment["ANSIBLE_ROLES_PATH"] = str(ROOT / "ansible" / "roles")
    done = subprocess.run(
        command, env=environment, cwd=tmp, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0, done.stdout
    # nothing came after the refusal
    assert "Install munge" not in done.stdout
    said = done.stdout + done.stderr
    assert KEY not in said
    assert KEY[::-1] not in said
    return said


NO_QUEUE = {"systemctl": "exit 3"}


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("programs", "values", "why"),
    [
        (
            NO_QUEUE,
            {"n2": {"slurm_head": "n2", "slurm_munge_key": KEY[::-1]}},
            "The hosts name different heads: n1 names n1, n2 names n2.",
        ),
        (
            {"systemctl": "exit 0"},
            {},
            "n2 runs a queue (slurmctld), and slurm_head is n1.",
        ),
        (
            NO_QUEUE,
            {"n2": {"slurm_munge_key": "short"}},
            "slurm_munge_key is no line of 32 to 1024 letters and digits.",
        ),
    ],
    ids=["two heads", "a second controller", "no key"],
)
def test_what_makes_no_cluster_is_refused_in_one_line(
    tmp_path: Path, programs: dict[str, str], values: dict[str, Any], why: str
) -> None:
    assert why in refused(tmp_path, "present.yml", programs, **values)


def test_a_node_of_another_architecture_is_refused(tmp_path: Path) -> None:
    # the first to ask is of one kind, the second of another
    asked = tmp_path / "asked"
    uname = f"mkdir {asked} 2>/dev/null && echo x86_64 || echo aarch64"
    said = refused(tmp_path, "look.yml", {"uname": uname})
    assert "The hosts have different processors: n1 has x86_64, n2 has aarch64." in said
    assert "Make a cluster for each kind." in said
