"""Options of the promises as testinfra tests; test_promises.py has the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.hosts.fleet.playbook import ansible_program


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the promises come from, if not from the inventory."""
    parser.addoption("--promises", help="folder of files that ansible/promises.yml wrote")


def pytest_configure(config: pytest.Config) -> None:
    """Let testinfra find the Ansible of this environment, also where it is not on the path."""
    hosts = config.getoption("--hosts", default=None) or ""
    if "ansible://" in hosts:
        place = Path(ansible_program("ansible-inventory")).parent
        os.environ["PATH"] = f"{place}{os.pathsep}{os.environ['PATH']}"
