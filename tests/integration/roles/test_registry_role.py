"""The role registry: its key stays unseen, and its values reach no shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.integration.roles.role_values import role_values
from tests.testbed.playbook import ROOT, ansible_environment, ansible_program

ROLE = ROOT / "ansible" / "roles" / "registry"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQ-the-secret\n-----END PRIVATE KEY-----\n"


def task_of(name: str) -> dict[str, Any]:
    """One task of the role, without what only a real host has."""
    tasks = yaml.safe_load((ROLE / "tasks" / "present.yml").read_text(encoding="utf-8"))
    (task,) = [dict(task) for task in tasks if task["name"] == name]
    task.pop("notify", None)
    for module in task.values():
        if isinstance(module, dict):
            module.pop("owner", None)
            module.pop("group", None)
    return task


def run_tasks(
    tmp_path: Path, tasks: list[dict[str, Any]], *args: str, **values: Any
) -> subprocess.CompletedProcess[str]:
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {"ansible_python_interpreter": sys.executable, "registry_installed": {}, **values},
        "tasks": tasks,
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    command = [ansible_program("ansible-playbook"), "--inventory", "localhost,", *args]
    return subprocess.run(
        [*command, str(tmp_path / "play.yml")],
        env={**ansible_environment(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plan_of_a_new_key_does_not_show_it(tmp_path: Path) -> None:
    key, certificate, home = (tmp_path / name for name in ("my.key", "my.crt", "home"))
    key.write_text(KEY)
    certificate.write_text("certificate\n")
    home.mkdir()
    (home / "server.key").write_text(KEY.replace("secret", "older"))
    done = run_tasks(
        tmp_path,
        [task_of("Copy the certificate")],
        *("--check", "--diff"),
        registry_key=str(key),
        registry_certificate=str(certificate),
        registry_home=str(home),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=1" in done.stdout
    assert "MIIEvQ" not in done.stdout + done.stderr


def test_a_name_with_a_command_in_it_is_only_a_name(tmp_path: Path) -> None:
    (tmp_path / "files").symlink_to(ROLE / "files")
    planted = tmp_path / "planted"
    run_tasks(
        tmp_path,
        [task_of("Make an own CA and a certificate")],
        registry_home=str(tmp_path),
        registry_name=f"x; touch {planted} #",
        registry_alternative="DNS:x",
    )
    assert not planted.exists()
    assert (tmp_path / "ca.crt").exists()


GOOD = ("registry", "registry.example", "a-b.c1", "10.0.0.1", "::1", "fd00::5", "2001:db8::1.2.3.4")
BAD = (
    *("x; reboot", "x y", "-x", "x-", "", "x\n", "x\nDNS:evil", "$(id)", "`id`", "x/y", "x'"),
    *("DNS:x,IP:1.2.3.4", "é", "x" * 300),
)


def test_only_names_and_addresses_are_names(tmp_path: Path) -> None:
    cases = [{"registry_name": name} for name in (*GOOD, *BAD)]
    answers = role_values("registry", tmp_path, "registry_name is match(registry_name_form)", cases)
    assert answers == ["True"] * len(GOOD) + ["False"] * len(BAD)
