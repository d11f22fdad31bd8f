"""The unit that limits clocks, as Ansible writes it, with a stand-in for nvidia-smi."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testbed.playbook import ROOT, ansible_environment, ansible_program
from tests.testbed.unit_file import settings, words

ROLE = ROOT / "ansible" / "roles" / "host_tuning"
# as an H200 with driver 580.159.04 answered; all of them end with 0
TAKEN = 'GPU clocks set to "(gpuClkMin 300, gpuClkMax 2100)" for GPU 00000000:00:06.0'
REFUSED = (
    'Specified clock combination "(gpuClkMin 900, gpuClkMax 600)" is not supported for GPU'
    " 00000000:00:06.0. Run 'nvidia-smi -q -d SUPPORTED_CLOCKS'"
)
NO_MEMORY = "This option is not supported. Please use --lock-memory-clocks-deferred instead."
LIMITED = {
    "host_tuning_gpu_clocks_mhz": [300, 2100],
    "host_tuning_memory_clocks_mhz": [5001, 14001],
}


def run_play(tmp_path: Path, **values: Any) -> tuple[subprocess.CompletedProcess[str], str]:
    """The role's check of the values, and its unit."""
    tasks = yaml.safe_load((ROLE / "tasks" / "main.yml").read_text(encoding="utf-8"))
    (check,) = [task for task in tasks if task["name"] == "Stop where clocks are no range"]
    found = "{{ host_tuning_files | selectattr('path', 'search', 'sm120-clocks') }}"
    unit = tmp_path / "unit"
    write = {
        "name": "Write it",
        "ansible.builtin.copy": {"content": "{{ item.content }}", "dest": str(unit)},
        "loop": found,
        "when": "item.wanted",
    }
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {"ansible_python_interpreter": sys.executable},
        "vars_files": [str(ROLE / part / "main.yml") for part in ("defaults", "vars")],
        "tasks": [check, write],
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    command = [ansible_program("ansible-playbook"), "--inventory", "localhost,"]
    done = subprocess.run(
        [*command, "--extra-vars", json.dumps(values), str(tmp_path / "play.yml")],
        env={**ansible_environment(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, unit.read_text() if unit.exists() else ""


def started(tmp_path: Path, unit: str, answer: str) -> list[int]:
    """The exit code of each command of the unit, where nvidia-smi says this and ends with 0."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho \"$@\" >>{tmp_path}/asked\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    commands = [words(text) for name, text in settings(unit, "Service") if name == "ExecStart"]
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    return [subprocess.run(argv, env=env, check=False).returncode for argv in commands]


def test_clocks_are_limited_by_a_unit_that_fails_where_a_card_refuses(tmp_path: Path) -> None:
    done, unit = run_play(tmp_path, **LIMITED)
    assert done.returncode == 0, done.stdout
    assert started(tmp_path, unit, TAKEN) == [0, 0]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["--lock-gpu-clocks=300,2100", "--lock-memory-clocks=5001,14001"]
    assert started(tmp_path, unit, REFUSED) == [1, 1]
    assert started(tmp_path, unit, NO_MEMORY) == [1, 1]
    resets = [text for name, text in settings(unit, "Service") if name == "ExecStopPost"]
    assert resets == [f"-/usr/bin/nvidia-smi --reset-{kind}-clocks" for kind in ("gpu", "memory")]


def test_without_a_range_there_is_no_unit(tmp_path: Path) -> None:
    done, unit = run_play(tmp_path)
    assert (done.returncode, unit) == (0, "")
    assert run_play(tmp_path, host_tuning_state="absent", **LIMITED)[1] == ""


BIG = [pytest.param(each, marks=pytest.mark.big) for each in ([0, 300], [1, 2, 3])]


@pytest.mark.parametrize("clocks", [[2100], [2100, 300], *BIG])
def test_what_is_no_range_stops_the_play(tmp_path: Path, clocks: list[int]) -> None:
    done, unit = run_play(tmp_path, host_tuning_gpu_clocks_mhz=clocks)
    assert done.returncode != 0
    assert "no least and most of MHz" in done.stdout
    assert unit == ""
