"""Runs ansible-playbook from our own environment, with the settings of this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pipeline.core import log, proc
from pipeline.core.errors import FleetUnready
from pipeline.hosts.fleet.promised import HostConnection, Promised, read_promised
from pipeline.images.spec.checkout import Checkout

_VAULT = (
    "Give the vault's right password with --ask-vault-pass, --vault-password-file or --vault-id."
)
ANSIBLE_HINT = (
    "Run the same words after `nox -s sm120 --`, or install the group `hosts` of pyproject.toml."
)
# What ssh and Ansible need of the caller's environment; ANSIBLE_* is passed as well.
_PASSED = ("SSH_AUTH_SOCK", "USER", "LOGNAME", "TERM", "VIRTUAL_ENV")


def ansible_program(name: str) -> str:
    """Find a program of ansible-core: next to our Python, else on the path."""
    # first, because a system's own Ansible on the path may be another version
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    return proc.find_tool(name, ANSIBLE_HINT)


def ansible_environment(checkout: Checkout) -> dict[str, str]:
    """A short environment with the caller's own settings of Ansible."""
    own = [n for n in os.environ if n.startswith("ANSIBLE_")]
    environment = proc.child_environment(*_PASSED, *own)
    environment.setdefault("ANSIBLE_CONFIG", str(checkout.root / "ansible" / "ansible.cfg"))
    return environment


class Played(NamedTuple):
    """How a playbook ended, on which hosts."""

    code: int
    failed: list[str]
    done: list[str]
    untouched: list[str]  # a failed canary or batch ends the run before these
    unreached: list[str] = []  # of those that failed

    @property
    def summary(self) -> str:
        """Which hosts failed, which are done and which the run did not reach, in one line."""
        hosts = {"failed": self.failed, "done": self.done, "not touched": self.untouched}
        parts = [f"{how}: {', '.join(names)}" for how, names in hosts.items() if names]
        return "; ".join(parts) or f"ansible-playbook ended with code {self.code} before any host"


def stream_playbook(
    checkout: Checkout, name: str, arguments: Sequence[str], output: int | None = None
) -> Played:
    """Run a playbook with its output on the terminal; how it ended on each host.

    `output` is the number of another file than stdout, for a command whose result goes there.
    """
    command = [ansible_program("ansible-playbook"), str(checkout.root / "ansible" / name)]
    env = ansible_environment(checkout)
    # Ansible writes its recap to a log as well, and the terminal keeps its colours; the log is
    # readable by its owner alone and goes with the folder
    with tempfile.TemporaryDirectory(prefix="sm120-") as folder:
        written = Path(folder, "log")
        # a task says nothing before it ends, and installing a driver takes minutes
        with log.watched(_TaskReader(written).task, log.SAME_LINE_EVERY_S):
            code = subprocess.run(
                [*command, *arguments],
                env={**env, "ANSIBLE_LOG_PATH": str(written)},
                stdout=output,
                check=False,
            ).returncode
        lines = written.read_text("utf-8", "replace").splitlines() if written.exists() else []
    if code == 0:
        return Played(code, [], [], [])
    recap = {m["host"]: m for line in lines if (m := _RECAP.search(line))}
    unreached = [h for h, m in recap.items() if int(m["unreachable"])]
    failed = [h for h, m in recap.items() if int(m["failed"]) or h in unreached]
    listed = proc.read([*command, *arguments, "--list-hosts"], env=env).stdout.decode()
    hosts = [line.strip() for line in listed.splitlines() if line.startswith(" " * 6)]
    untouched = sorted({*hosts} - {*recap})
    return Played(code, failed, [h for h in recap if h not in failed], untouched, unreached)


class _TaskReader:
    """Finds the running task in the log that Ansible writes line by line."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes, self._task = path, 0, ""

    def task(self) -> str:
        """The last that began; empty before the first, as a password may be asked for."""
        if not self._path.exists():
            return ""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        if new:
            log.heard()
            # a line that is cut in two is read whole the next time
            whole = new[: new.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            if named := _TASK.findall(whole.decode("utf-8", "replace")):
                self._task = named[-1]
        return self._task


# The value of a password or a token to the end of its line; the name of a variable is no secret.
_SECRET = re.compile(
    r"(?i)\w*(?:pass|secret|token|api_?key)\w*[\"']?\s*[:=]\s*(?![\"']?\{\{|!vault)(\S.*)"
)
_TASK = re.compile(r"(?:TASK|RUNNING HANDLER) \[(.*)\] \*")
_RECAP = re.compile(
    r"(?P<host>\S+)\s+: ok=\d+\s+changed=\d+"
    r"\s+unreachable=(?P<unreachable>\d+)\s+failed=(?P<failed>\d+)"
)


@contextmanager
def promises_of(
    checkout: Checkout, arguments: Sequence[str], playbook: str = "promises.yml"
) -> Iterator[list[Promised]]:
    """What each host of an inventory was promised, as a play writes it.

    The files hold passwords, so they exist only as long as the block.
    """
    with tempfile.TemporaryDirectory(prefix="sm120-") as name:
        place = Path(name, "promised")
        place.mkdir(mode=0o700)  # connection and sudo passwords are written into it
        command = [ansible_program("ansible-playbook"), str(checkout.root / "ansible" / playbook)]
        command += [*arguments, "--extra-vars", f"sm120_promises_to={place}"]
        done = proc.read(command, env=ansible_environment(checkout))
        hosts = [read_promised(path) for path in sorted(place.glob("*.json"))]
        if done.returncode != 0 or not hosts:
            lines = (done.stdout + b"\n" + done.stderr).decode(errors="replace").splitlines()
            # the clearest mark first; of its lines the first, as later ones are consequences
            marks = ("[ERROR]", "ERROR!", "fatal:", "error:", "msg:", "[WARNING]")
            named = (x.strip()[:400] for mark in marks for x in lines if mark in x)
            no_host = done.returncode == 0
            message = next(
                named, "no host of this inventory matches" if no_host else "Ansible failed"
            )
            # a line that Ansible cannot read it prints, and that may be a password's
            for path in (Path(x) for a, x in pairwise(arguments) if a == "--inventory"):
                text = path.read_text("utf-8", "replace") if path.is_file() else ""
                for word in (x.strip("\"',[]") for x in " ".join(_SECRET.findall(text)).split()):
                    # shorter ones would be found in every word
                    message = message.replace(word, "(hidden)") if len(word) > 2 else message
            raise FleetUnready(message, _VAULT if "vault" in message.lower() else "")
        yield hosts


def connection_of(checkout: Checkout, inventories: Sequence[str], host: str) -> HostConnection:
    """Find out how Ansible reaches one host, without contacting it."""
    arguments = [x for each in inventories for x in ("--inventory", each)]
    with promises_of(checkout, [*arguments, "--limit", host], "connection.yml") as hosts:
        # a group's name, too, is a limit
        if [each.host for each in hosts] != [host]:
            names = ", ".join(each.host for each in hosts)
            raise FleetUnready(
                f"{host} is not one host of the inventory, but {names}",
                "Name one host: `ansible-inventory -i INVENTORY --list` shows them.",
            )
        return hosts[0].connection
