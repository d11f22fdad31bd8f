"""Swap, and the promises under plain pytest, on a node that only the role host_tuning touched.

A node shares its kernel with the machine that runs the tests, whose own swap must stay: what the
kernel swaps to, `swapon` and `swapoff` are stand-ins. The unit `swap.target` is systemd's own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.site import Site, new_site
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.nodes import USER
from tests.testbed.playbook import ROOT

pytestmark = pytest.mark.timeout(1800)
_HEAD = "Filename\tType\tSize\tUsed\tPriority"
_SWAP = "/swapfile\tfile\t1048572\t0\t-2"
# both are called with --all; the file is written in place, as it is bound to /proc/swaps
_STAND_IN = f"""
printf '{_HEAD}\\n{_SWAP}\\n' > /root/swaps
mount --bind /root/swaps /proc/swaps
printf '#!/bin/sh\\nprintf "{_HEAD}\\\\n" > /root/swaps\\n' > /usr/local/sbin/swapoff
printf '#!/bin/sh\\nprintf "{_HEAD}\\\\n{_SWAP}\\\\n" > /root/swaps\\n' > /usr/local/sbin/swapon
chmod 755 /usr/local/sbin/swapoff /usr/local/sbin/swapon
"""


@pytest.fixture(scope="module")
def site(docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with new_site(docker_daemon, tmp_path_factory.mktemp("site"), ["n1"]) as made:
        made.first.shell(_STAND_IN)
        yield made


def swap_on(site: Site) -> tuple[bool, str, bool]:
    """Whether stand-in swap is in use, whether swap.target may start, and whether we noted it."""
    node = site.first
    return (
        _SWAP in node.shell("cat /proc/swaps"),
        node.shell("systemctl is-enabled swap.target", check=False).strip(),
        node.shell("ls /var/lib/sm120/swap-off", check=False) != "",
    )


def test_swap_goes_off_stays_off_and_comes_back_with_stand_ins_for_the_kernel(site: Site) -> None:
    tags = ("--tags", "host_tuning")
    before = swap_on(site)
    assert before[0]
    site.run(*tags, "--check", host_tuning_swap="off").require_good()
    assert swap_on(site) == before
    site.run(*tags, host_tuning_swap="off").require_good()
    assert swap_on(site) == (False, "masked", True)
    again = site.run(*tags, host_tuning_swap="off").require_good()
    assert again.count("changed") == 0
    site.run(*tags, host_tuning_swap="keep").require_good()
    assert swap_on(site) == before
    again = site.run(*tags, host_tuning_swap="keep").require_good()
    assert again.count("changed") == 0


# Ansible starts anew for each of some hundred commands: minutes of both cores
@pytest.mark.parametrize("form", ["--sudo", pytest.param("--force-ansible", marks=pytest.mark.big)])
def test_the_promises_run_under_plain_pytest_as_the_page_says(
    site: Site, form: str, tmp_path: Path
) -> None:
    site.run("--tags", "host_tuning", host_tuning_swap="off").require_good()
    site.values["host_tuning_swap"] = "off"
    if form == "--sudo":
        site.first.shell(f"echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/nopasswd")
    else:
        site.first.shell("rm -f /etc/sudoers.d/nopasswd")
        site.values["ansible_become"] = True

    def run_promises() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-rA", form]
        where = ["--hosts=ansible://all", f"--ansible-inventory={site.inventory()}"]
        return subprocess.run(
            [*command, *where, "pipeline/hosts/promises", "-k", "host_tuning"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    good = run_promises()
    print(good.stdout[-4000:], good.stderr[-2000:])
    assert " passed" in good.stdout.splitlines()[-1]
    failed = [line for line in good.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert failed == []
    # a promise that is broken is seen
    site.first.shell("sysctl --quiet --write vm.swappiness=33")
    broken = run_promises()
    assert broken.returncode == 1
    assert "vm.swappiness" in broken.stdout
    site.first.shell("sysctl --quiet --write vm.swappiness=0")
