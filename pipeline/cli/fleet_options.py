"""What `host verify` and `host provision` share: an inventory, and how to reach its hosts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import Command

if TYPE_CHECKING:
    from pipeline.host.fleet.promised import Promised

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_OPTIONS: Sequence[Callable[[Any], Any]] = (
    click.option("-i", "--inventory", "inventories", multiple=True, required=True),
    click.option("-l", "--limit", help="Only these hosts or groups."),
    click.option("-e", "--extra-vars", multiple=True, help="Variables over the inventory's."),
    click.option("-u", "--user", help="The user on the hosts."),
    click.option("--private-key", type=_FILE, help="The SSH key."),
    click.option("--vault-password-file", type=_FILE, help="Ansible's vault."),
    click.option("-K", "--ask-become-pass", is_flag=True, help="Ask for sudo's password once."),
    click.option("--become-password-file", type=_FILE, help="sudo's password."),
    click.option(
        "--records",
        type=click.Path(path_type=Path, file_okay=False),
        help="Where host records lie [default: records/ beside the inventory].",
    ),
)


@dataclass(frozen=True)
class Fleet:
    """An inventory as the user named it."""

    inventories: tuple[str, ...]
    limit: str | None
    extra_vars: tuple[str, ...]
    user: str | None
    private_key: Path | None
    vault_password_file: Path | None
    password: str
    records: Path

    def arguments(self) -> list[str]:
        """The same for Ansible."""
        pairs = [("--inventory", i) for i in self.inventories]
        pairs += [("--extra-vars", e) for e in self.extra_vars]
        single = {
            "--limit": self.limit,
            "--user": self.user,
            "--private-key": self.private_key,
            "--vault-password-file": self.vault_password_file,
        }
        pairs += [(name, str(value)) for name, value in single.items() if value is not None]
        return [word for pair in pairs for word in pair]

    def reach(self, promised: Promised) -> Promised:
        """Fill in what only the command line says."""
        to = promised.connection
        filled = {
            "user": to.user or self.user or "",
            "key": to.key or str(self.private_key or ""),
            "become_password": to.become_password or self.password,
        }
        return promised.model_copy(update={"connection": to.model_copy(update=filled)})

    @contextmanager
    def password_file(self) -> Iterator[list[str]]:
        """sudo's password for Ansible, in a file of our own that is gone with the block."""
        if not self.password:
            yield []
            return
        with tempfile.TemporaryDirectory(prefix="sm120-") as folder:
            path = Path(folder, "become")
            path.touch(mode=0o600)
            path.write_text(self.password + "\n", encoding="utf-8")
            yield ["--become-password-file", str(path)]


def fleet_options(command: Command) -> Command:
    """Add the options that make a Fleet."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def fleet_of(given: dict[str, Any]) -> Fleet:
    """The Fleet of these options; asks for a password where that was asked for."""
    password = ""
    if given["become_password_file"] is not None:
        password = given["become_password_file"].read_text("utf-8").rstrip("\r\n")
    elif given["ask_become_pass"]:
        password = click.prompt("sudo password", hide_input=True, err=True)
    names = ("inventories", "limit", "extra_vars", "user", "private_key", "vault_password_file")
    records = given["records"] or _beside(given["inventories"][0])
    return Fleet(**{n: given[n] for n in names}, password=password, records=records)


def _beside(inventory: str) -> Path:
    """Records lie where a site keeps its inventory, not in this checkout.

    Not inside a folder that is an inventory: Ansible would take them for a part of it.
    """
    path = Path(os.path.abspath(inventory))  # noqa: PTH100 -- links stay as they are
    if path.is_dir():
        return path.with_name(f"{path.name}-records")
    return (path.parent if path.exists() else Path.cwd()) / "records"
