"""The group of commands about hosts."""

from __future__ import annotations

import click

from pipeline.cli.host_check import check, tune_nccl
from pipeline.cli.host_facts import doctor, drift, facts, outliers

HOST_COMMANDS = (facts, check, doctor, tune_nccl, drift, outliers)


@click.group("host")
def host() -> None:
    """Say what a host is, and prove that it works."""
