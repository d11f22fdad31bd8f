"""Run the real playbook against nodes, and read what Ansible says of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.testbed.nodes import PASSWORD, USER, Fleet
from tests.testbed.packages import CannotHave, system_environment

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = ROOT / "ansible" / "site.yml"
ROLLBACK = ROOT / "ansible" / "rollback.yml"
# `host` commands without any option
NO_OPTIONS: Mapping[str, Any] = {
    **dict.fromkeys(("limit", "user", "private_key", "vault_password_file", "records"), None),
    **dict.fromkeys(("become_password_file", "connection_password_file"), None),
    **dict.fromkeys(("ask_become_pass", "ask_pass", "ask_vault_pass"), False),
    **{"extra_vars": (), "vault_ids": (), "jobs": 20},
}
_RECAP = re.compile(r"^(?P<host>\S+)\s+: (?P<counts>ok=.*)$", re.M)
_TASK = re.compile(r"^(TASK|RUNNING HANDLER) \[", re.M)


@dataclass(frozen=True)
class Run:
    """How a run ended: its words, its counts a host, its exit code and its seconds."""

    code: int
    text: str
    recap: Mapping[str, Mapping[str, int]]
    seconds: float

    def count(self, what: str) -> int:
        """A count over all hosts."""
        return sum(counts[what] for counts in self.recap.values())

    @property
    def tasks(self) -> int:
        return len(_TASK.findall(self.text))

    def require_good(self) -> Run:
        """The run, or its last words."""
        assert self.code == 0, self.text[-4000:]
        return self


def ansible_program(name: str) -> str:
    """A program of ansible-core, from the environment of the tests."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise CannotHave(f"{name} is not installed (group hosts).")
    return found


def write_inventory(
    place: Path,
    fleet: Fleet,
    values: Mapping[str, Any],
    *,
    password: str = PASSWORD,
    host_values: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Path:
    """All nodes, with these variables for each, and with those of single hosts."""
    # another run's nodes may have had the same addresses a moment ago; and the name of a socket has
    # 107 characters at most, which the folder of a test may fill
    name = hashlib.sha256(str(place).encode()).hexdigest()[:12]
    sockets = Path(tempfile.gettempdir(), f"sm120-ssh-{os.geteuid()}", name)
    common = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -i {fleet.key_file}"
    hosts = {
        node.name: {"ansible_host": node.address, **host_values.get(node.name, {})}
        for node in fleet.nodes
    }
    shared = {
        "ansible_user": USER,
        "ansible_become_password": password,
        "ansible_ssh_common_args": common,
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_control_path_dir": str(sockets),
        **values,
    }
    place.write_text(json.dumps({"all": {"hosts": hosts, "vars": shared}}))
    return place


def run_playbook(
    inventory: Path,
    *args: str,
    playbook: Path = PLAYBOOK,
    cut_off_at: str | None = None,
    **values: Any,
) -> Run:
    """One run; `cut_off_at` kills it when it begins a task of that name."""
    command = [ansible_program("ansible-playbook"), "--inventory", str(inventory), str(playbook)]
    command += ["--extra-vars", json.dumps({"sm120_batches": "100%", **values}), *args]
    begun = time.monotonic()
    with subprocess.Popen(
        command,
        env=ansible_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        text = _read(process, cut_off_at)
    return Run(process.returncode, text, recap_of(text), time.monotonic() - begun)


def packed_once() -> dict[str, str]:
    """Settings by which the runs of a user share the modules that Ansible packs."""
    # of one version, and of nobody else
    name = f"sm120-packed-{version('ansible-core')}-{sys.version_info.minor}-{os.geteuid()}"
    place = Path(tempfile.gettempdir(), name)
    place.mkdir(mode=0o700, exist_ok=True)
    plugins = str(Path(__file__).with_name("ansible"))
    return {"ANSIBLE_CALLBACK_PLUGINS": plugins, "ANSIBLE_PACKED_MODULES": str(place)}


def ansible_environment() -> dict[str, str]:
    """What Ansible is told; its programs lie beside our Python."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    config = str(ROOT / "ansible" / "ansible.cfg")
    return system_environment(
        PATH=path,
        ANSIBLE_CONFIG=config,
        ANSIBLE_NOCOLOR="1",
        # a busy machine is slow to ask for sudo's password
        ANSIBLE_TIMEOUT="90",
        **packed_once(),
    )


def _read(process: subprocess.Popen[str], cut_off_at: str | None) -> str:
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if cut_off_at and cut_off_at in line:
            os.killpg(process.pid, signal.SIGKILL)
    return "".join(lines)


def recap_of(text: str) -> dict[str, dict[str, int]]:
    """The counts at the end of a run, by host."""
    return {
        row["host"]: {k: int(v) for k, v in (p.split("=") for p in row["counts"].split())}
        for row in _RECAP.finditer(text)
    }
