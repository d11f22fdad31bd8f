"""The role engine, by the real Ansible on this machine alone: weights and promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.playbook import ansible_environment, ansible_program
from tests.unit.hosts.test_engine_promises import RECORD

# stands for the program of the role weights; writes down how it was called
PROGRAM = """#!/bin/sh
echo "$@" >> {0}/called
echo '{{"brought": {1}}}'
exit {2}
"""


def run_role(tmp_path: Path, entry: str, **values: Any) -> subprocess.CompletedProcess[str]:
    role = {"ansible.builtin.include_role": {"name": "engine", "tasks_from": entry}}
    show = {"ansible.builtin.debug": {"var": "engine_promises"}}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False}
    (tmp_path / "play.yml").write_text(json.dumps([{**play, "tasks": [role, show]}]))
    given = {"ansible_python_interpreter": sys.executable, **values}
    command = [ansible_program("ansible-playbook"), "--inventory", "localhost,"]
    return subprocess.run(
        [*command, str(tmp_path / "play.yml"), "--extra-vars", json.dumps(given)],
        env={**ansible_environment(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )


def weights(tmp_path: Path, brought: str = "[]", code: int = 0) -> dict[str, Any]:
    (tmp_path / "order.json").write_text(RECORD.model_dump_json())
    (tmp_path / "big.lock.yaml").write_text("lock")
    (tmp_path / "checkout" / "lockfiles" / "weights").mkdir(parents=True)
    program = tmp_path / "sm120"
    program.write_text(PROGRAM.format(tmp_path, brought, code))
    program.chmod(0o755)
    return {
        "engine_order": str(tmp_path / "order.json"),
        "engine_program": str(program),
        "engine_checkout": str(tmp_path / "checkout"),
        "engine_weights_set": "big",
        "engine_weights_lock": str(tmp_path / "big.lock.yaml"),
        "engine_weights_from": ["http://n1:8000", "/mnt/models"],
    }


@pytest.mark.parametrize(("brought", "changed"), [("[]", "changed=1"), ('["a"]', "changed=2")])
def test_a_host_brings_the_locked_set_itself_from_the_named_sources(
    tmp_path: Path, brought: str, changed: str
) -> None:
    done = run_role(tmp_path, "weights", **weights(tmp_path, brought))
    assert done.returncode == 0, done.stdout[-2000:]
    # the lock is new in both cases
    assert changed in done.stdout
    called = (tmp_path / "called").read_text()
    assert "weights fetch big --output /models/tiny --json" in called
    assert called.endswith("--from=http://n1:8000 --from=/mnt/models\n")
    lock = tmp_path / "checkout" / "lockfiles" / "weights" / "big.lock.yaml"
    assert lock.read_text() == "lock"


def test_damaged_weights_and_a_missing_program_stop_the_host(tmp_path: Path) -> None:
    values = weights(tmp_path, code=60)
    assert "failed=1" in run_role(tmp_path, "weights", **values).stdout
    Path(values["engine_program"]).unlink()
    done = run_role(tmp_path, "weights", **values)
    assert "that could bring and prove big: add `weights`" in " ".join(done.stdout.split())


def test_promises_are_what_was_recorded_beside_the_inventory(tmp_path: Path) -> None:
    folder = tmp_path / "engines" / "localhost"
    folder.mkdir(parents=True)
    empty = run_role(tmp_path, "promises", engine_records=str(tmp_path / "engines"))
    assert "state: absent" in empty.stdout
    # text that a template would change stays as it is
    record = RECORD.model_copy(update={"unit": "Exec=x {{ lookup('env', 'HOME') }}\n"})
    (folder / "tiny.json").write_text(record.model_dump_json())
    done = run_role(tmp_path, "promises", engine_records=str(tmp_path / "engines"))
    assert "state: present" in done.stdout
    assert "{{ lookup('env', 'HOME') }}" in done.stdout
