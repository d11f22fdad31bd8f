"""Which lock a host is given, by what Ansible's facts say of it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pipeline.hosts.spec import read_host_spec
from pipeline.images.spec.checkout import Checkout
from tests.testbed.playbook import PLAYBOOK, ROOT

jinja2 = pytest.importorskip("jinja2", reason="ansible-core is not installed (group hosts).")


def target_of(distribution: str, version: str, architecture: str) -> str:
    """What the playbook's own expressions make of the facts."""
    shared = yaml.safe_load((PLAYBOOK.parent / "vars" / "site.yml").read_text(encoding="utf-8"))
    facts = {
        "distribution": distribution,
        "distribution_version": version,
        "distribution_major_version": version.partition(".")[0],
        "architecture": architecture,
    }
    environment = jinja2.Environment()
    values: dict[str, Any] = {"ansible_facts": facts}
    for name in ("sm120_system", "sm120_target"):
        values[name] = environment.from_string(shared[name]).render(values)
    return str(values["sm120_target"])


@pytest.mark.parametrize(
    ("distribution", "version", "architecture", "target"),
    [
        ("Debian", "12.11", "x86_64", "debian-12/amd64"),
        ("Debian", "12.11", "aarch64", "debian-12/arm64"),
        ("Debian", "13.1", "x86_64", "debian-13/amd64"),
        ("Debian", "13.1", "aarch64", "debian-13/arm64"),
        ("Ubuntu", "24.04", "x86_64", "ubuntu-24.04/amd64"),
        ("Ubuntu", "24.04", "aarch64", "ubuntu-24.04/arm64"),
    ],
)
def test_every_system_is_given_a_target_that_the_spec_names(
    distribution: str, version: str, architecture: str, target: str
) -> None:
    assert target_of(distribution, version, architecture) == target
    assert target in read_host_spec(Checkout(ROOT)).targets


@pytest.mark.parametrize(
    ("distribution", "version", "architecture"),
    [
        ("Debian", "11.9", "x86_64"),
        ("Ubuntu", "22.04", "x86_64"),
        ("Ubuntu", "24.10", "x86_64"),
        ("Fedora", "42", "x86_64"),
        ("Debian", "12.11", "riscv64"),
    ],
)
def test_a_system_that_nobody_asked_for_has_no_target_in_the_spec(
    distribution: str, version: str, architecture: str
) -> None:
    specified = read_host_spec(Checkout(ROOT)).targets
    assert target_of(distribution, version, architecture) not in specified
