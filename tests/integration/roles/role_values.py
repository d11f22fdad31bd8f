"""What a role makes of its variables, without a host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.testbed.playbook import ROOT, ansible_environment, ansible_program


def role_values(
    role: str, tmp_path: Path, expression: str, cases: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What an expression over the role's variables gives, in each case of other variables."""
    place = tmp_path / "answers"
    # set_fact is done by Ansible itself, while each module is a process of its own
    tasks: list[dict[str, Any]] = [
        {
            "ansible.builtin.set_fact": {
                "answers": f"{{{{ answers | default([]) + [({expression}) | string] }}}}"
            },
            "vars": dict(case),
        }
        for case in cases
    ]
    written = {"content": "{{ answers | to_json }}", "dest": str(place), "mode": "0600"}
    tasks.append({"ansible.builtin.copy": written})
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {"ansible_python_interpreter": sys.executable},
        "vars_files": [str(ROOT / "ansible" / "roles" / role / "vars" / "main.yml")],
        "tasks": tasks,
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    command = [ansible_program("ansible-playbook"), "--inventory", "localhost,"]
    env = {**ansible_environment(), "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, str(tmp_path / "play.yml")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers: list[str] = json.loads(place.read_text(encoding="utf-8"))
    return answers
