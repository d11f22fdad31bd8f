"""What `host verify` and `host provision` share: an inventory, and how to reach its hosts."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeline import proc
from pipeline.cli.options import EXISTING_FILE, all_of, jobs_option
from pipeline.errors import FleetUnready
from pipeline.host.fleet.promised import Promised

# a program in the place of a password file may itself ask a person
_ASK_LIMIT_S = 60.0
_OPTIONS: Sequence[Callable[[Any], Any]] = (
    click.option(
        "-i",
        "--inventory",
        "inventories",
        multiple=True,
        required=True,
        help="Ansible inventory of the hosts. Repeatable.",
    ),
    # the same letters and names as ansible-playbook, whose users type them without thinking
    click.option("-l", "--limit", help="Work on these hosts or groups only."),
    click.option(
        "-e",
        "--extra-vars",
        multiple=True,
        help="Variables that override the inventory's. Repeatable.",
    ),
    click.option("-u", "--user", help="User on the hosts."),
    click.option("--private-key", type=EXISTING_FILE, help="SSH key."),
    click.option(
        "--vault-password-file",
        type=EXISTING_FILE,
        help="File with the password of Ansible's vault.",
    ),
    click.option(
        "--vault-id", "vault_ids", multiple=True, help="Vault identity, as in Ansible. Repeatable."
    ),
    click.option("-J", "--ask-vault-pass", is_flag=True, help="Ask for the vault password once."),
    click.option("-k", "--ask-pass", is_flag=True, help="Ask for the SSH password once."),
    click.option(
        "--connection-password-file",
        type=EXISTING_FILE,
        envvar="ANSIBLE_CONNECTION_PASSWORD_FILE",
        help="File with the SSH password.",
    ),
    click.option("-K", "--ask-become-pass", is_flag=True, help="Ask for the sudo password once."),
    click.option(
        "--become-password-file",
        type=EXISTING_FILE,
        envvar="ANSIBLE_BECOME_PASSWORD_FILE",
        help="File with the sudo password.",
    ),
    click.option(
        "--records",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of host records [default: records/ beside the inventory].",
    ),
    jobs_option("Hosts in parallel.", most=1000, default=20),
)
fleet_options = all_of(_OPTIONS)


@dataclass(frozen=True, repr=False)
class Secrets:
    """Passwords that a person typed or a file holds; empty where there is none."""

    ssh: str = ""
    sudo: str = ""
    vault: str = ""


@dataclass(frozen=True)
class Fleet:
    """An inventory as the user named it."""

    inventories: tuple[str, ...]
    limit: str | None
    extra_vars: tuple[str, ...]
    user: str | None
    private_key: Path | None
    vault_password_file: Path | None
    vault_ids: tuple[str, ...]
    secrets: Secrets
    records: Path
    jobs: int

    def arguments(self) -> list[str]:
        """The same for Ansible."""
        pairs = [("--inventory", i) for i in self.inventories]
        pairs += [("--extra-vars", e) for e in self.extra_vars]
        pairs += [("--vault-id", v) for v in self.vault_ids]
        single = {
            "--limit": self.limit,
            "--user": self.user,
            "--private-key": self.private_key,
            "--vault-password-file": self.vault_password_file,
        }
        pairs += [(name, str(value)) for name, value in single.items() if value is not None]
        return [argument for pair in pairs for argument in pair]

    def require_inventories(self) -> None:
        """Refuse a name that is not there; Ansible only warns, and goes on with no hosts."""
        for each in self.inventories:
            # with a comma it is a list of hosts; a plugin's inventory is a file, too
            if "," not in each and not Path(each).exists():
                raise FleetUnready(
                    f"{each}: no such inventory",
                    "Name a file or folder, or hosts with a comma such as `rig1,`.",
                )

    def reach(self, promised: Promised) -> Promised:
        """Fill in what only the command line names."""
        to = promised.connection
        filled = {
            "user": to.user or self.user or "",
            "key": to.key or str(self.private_key or ""),
            # what the inventory has for one host is more exact than one password for all
            "password": to.password or self.secrets.ssh,
            "become_password": to.become_password or self.secrets.sudo,
        }
        return promised.model_copy(update={"connection": to.model_copy(update=filled)})

    @contextmanager
    def password_files(self) -> Iterator[list[str]]:
        """The passwords for Ansible, in files of our own that are gone with the block."""
        given = {
            "--connection-password-file": self.secrets.ssh,
            "--become-password-file": self.secrets.sudo,
            "--vault-password-file": self.secrets.vault,
        }
        arguments: list[str] = []
        # files, since the arguments of a process can be read by every user
        with tempfile.TemporaryDirectory(prefix="sm120-") as folder:
            for option, secret in given.items():
                if secret:
                    path = Path(folder, option.strip("-"))
                    path.touch(mode=0o600)
                    path.write_text(secret + "\n", encoding="utf-8")
                    arguments += [option, str(path)]
            yield arguments


def fleet_of(given: dict[str, Any]) -> Fleet:
    """The Fleet of these options; asks for passwords where that was asked for."""
    names = ("inventories", "limit", "extra_vars", "user", "private_key", "vault_password_file")
    records = given["records"] or _beside(given["inventories"][0])
    secrets = Secrets(
        ssh=_secret(given["connection_password_file"], given["ask_pass"], "SSH password"),
        sudo=_secret(given["become_password_file"], given["ask_become_pass"], "sudo password"),
        vault=_secret(None, given["ask_vault_pass"], "Vault password"),
    )
    chosen = {n: given[n] for n in (*names, "vault_ids", "jobs")}
    return Fleet(**chosen, secrets=secrets, records=records)


def _secret(path: Path | None, ask: bool, prompt: str) -> str:
    """From the user, from a file, or from the output of a program in its place, as Ansible does."""
    # asked once and handed on: Ansible and our own connections would each ask again
    if ask:
        typed: str = click.prompt(prompt, hide_input=True, err=True)
        return typed
    if path is None:
        return ""
    try:
        output = _output_of(path) if os.access(path, os.X_OK) else path.read_bytes()
        return output.decode("utf-8").rstrip("\r\n")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        what = "the program failed" if os.access(path, os.X_OK) else "it is not text"
        raise click.UsageError(f"{path}: no password can be read: {what}") from error


def _output_of(program: Path) -> bytes:
    done = proc.read([os.path.abspath(program)], timeout_s=_ASK_LIMIT_S)  # noqa: PTH100
    done.check_returncode()
    return done.stdout


def _beside(inventory: str) -> Path:
    """Records lie where a site keeps its inventory, not in this checkout.

    Not inside a folder that is an inventory: Ansible would take them for a part of it.
    """
    path = Path(os.path.abspath(inventory))  # noqa: PTH100 -- links stay as they are
    if path.is_dir():
        return path.with_name(f"{path.name}-records")
    return (path.parent if path.exists() else Path.cwd()) / "records"
