"""Swap, and the promises under plain pytest, on the node with the roles that need no reboot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.host_command import STAND_IN, SWAP, Hosts
from tests.integration.site import Site
from tests.testbed.nodes import USER
from tests.testbed.playbook import ROOT

pytestmark = [pytest.mark.timeout(1800), pytest.mark.share(1)]
TAGS = ("--tags", "host_tuning", "--limit", "n2")


@pytest.fixture
def site(hosts: Hosts) -> Site:
    """Its second node has the role, and stand-ins for swap."""
    assert hosts.first_run.code == 0, hosts.first_run.out[-3000:] + hosts.first_run.err
    # after a reboot the file is there, and is not bound to its place any more
    hosts.site.second.shell(STAND_IN)
    return hosts.site


def swap_on(site: Site) -> tuple[bool, str, bool]:
    """Whether stand-in swap is in use, whether swap.target may start, and whether we noted it."""
    node = site.second
    return (
        SWAP in node.shell("cat /proc/swaps"),
        node.shell("systemctl is-enabled swap.target", check=False).strip(),
        node.shell("find /var/lib/sm120 -name swap-off") != "",
    )


def test_swap_goes_off_stays_off_and_comes_back_with_stand_ins_for_the_kernel(
    site: Site, is_long: bool
) -> None:
    # the first run of the shared hosts has done it, and the second run changed nothing
    if is_long:
        site.run(*TAGS, "--check", host_tuning_swap="off").require_good()
        assert swap_on(site) == (True, "static", False)
        site.run(*TAGS, host_tuning_swap="off").require_good()
        again = site.run(*TAGS, host_tuning_swap="off").require_good()
        assert again.count("changed") == 0
    assert swap_on(site) == (False, "masked", True)
    site.host_values["n2"] = {**site.host_values.get("n2", {}), "host_tuning_swap": "keep"}
    assert site.run(*TAGS).require_good().count("changed") > 0
    assert swap_on(site) == (True, "static", False)
    if is_long:
        assert site.run(*TAGS).require_good().count("changed") == 0


# Ansible starts anew for each of some hundred commands: minutes of both cores
@pytest.mark.parametrize("form", ["--sudo", pytest.param("--force-ansible", marks=pytest.mark.big)])
def test_the_promises_run_under_plain_pytest_as_the_page_says(
    site: Site, form: str, tmp_path: Path, is_long: bool
) -> None:
    if form == "--sudo":
        site.second.shell(f"echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/nopasswd")
    else:
        site.second.shell("rm -f /etc/sudoers.d/nopasswd")
        site.values["ansible_become"] = True

    def run_promises(which: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", form]
        where = ["--hosts=ansible://n2", f"--ansible-inventory={site.inventory()}"]
        return subprocess.run(
            [*command, *where, "pipeline/hosts/promises", "-k", which],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    good = run_promises("host_tuning" if is_long else "host_tuning and kernel")
    print(good.stdout[-4000:], good.stderr[-2000:])
    assert " passed" in good.stdout.splitlines()[-1]
    failed = [line for line in good.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert failed == []
    # a promise that is broken is seen
    site.second.shell("sysctl --quiet --write vm.swappiness=33")
    broken = run_promises("host_tuning and kernel_knobs")
    assert broken.returncode == 1
    assert "vm.swappiness" in broken.stdout
    site.second.shell("sysctl --quiet --write vm.swappiness=0")
    site.second.shell("rm -f /etc/sudoers.d/nopasswd")
