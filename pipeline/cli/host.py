"""The group of commands about hosts."""

from __future__ import annotations

import click

from pipeline.cli.host_check import HOST_COMMANDS


@click.group("host")
def host() -> None:
    """Say what a host is, and prove that it works."""


for command in HOST_COMMANDS:
    host.add_command(command)
