"""Promises proved on fresh nodes over SSH, and broken there one after the other.

Real: SSH, sudo, apt, units, files. Stand-ins: packages' contents, kernel files and GRUB, as in
test_provision.py. Nodes have no GPU, so what needs one is seen to say so, and nothing more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import entered_or_skipped
from tests.integration.site import Site, new_site
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.playbook import ROOT, write_inventory

pytestmark = pytest.mark.timeout(1800)
# roles that need no reboot and little time
FEW = {"sm120_parts": ["nccl", "host_tuning"], "sm120_batches": "100%"}


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def rows(self, host: str, *verdicts: str) -> set[str]:
        """Promises of a host that ended so, as `role: promise`."""
        found = self.host(host)["rows"]
        return {f"{r['role']}: {r['promise']}" for r in found if r["verdict"] in verdicts}

    def host(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(h for h in json.loads(self.out)["hosts"] if h["host"] == name)
        return found


def command(site: Site, *words: str, **values: Any) -> Ended:
    """`sm120 host …` over the site's inventory."""
    inventory = write_inventory(site.tmp / "inventory.json", site.fleet, {**site.values, **values})
    link = site.checkout / "ansible"
    if not link.exists():
        link.symlink_to(ROOT / "ansible")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pipeline", "--checkout", str(site.checkout), "host"),
            *(words[0], "-i", str(inventory), *words[1:]),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def verify(site: Site, *words: str, **values: Any) -> Ended:
    return command(site, "verify", "--json", *words, **values)


@pytest.fixture(scope="module")
def site(docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        tmp = tmp_path_factory.mktemp("verify")
        made = entered_or_skipped(stack, new_site(docker_daemon, tmp, ["v1", "v2"]))
        made.values |= FEW
        yield made


@pytest.fixture(scope="module")
def provisioned(site: Site) -> Ended:
    """The first run of the whole command."""
    return command(site, "provision")


@pytest.fixture
def big(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--big"):
        pytest.skip("Whole runs one after the other take minutes: run with --big.")


def test_provision_ends_with_the_checks_and_keeps_a_record_of_each_host(
    site: Site, provisioned: Ended
) -> None:
    assert provisioned.code == 0, provisioned.out[-3000:] + provisioned.err
    assert "v1 moved: software.nccl_conf: unknown: /etc/nccl.conf" in provisioned.out
    for name in ("v1", "v2"):
        assert f"{name}: " in provisioned.out.rpartition("PLAY RECAP")[2]
        facts = json.loads((site.tmp / "records" / f"{name}.json").read_text())
        assert facts["host"] == name
        assert "NCCL_PROTO=LL" in facts["software"]["nccl_conf"]
    assert list((site.tmp / "records" / "captures").iterdir()) == []


BREAKS = {
    "nvidia_repository: the source is the one of the inventory": (
        "sed -i 's,^URIs:.*,URIs: http://elsewhere.invalid,'"
        " /etc/apt/sources.list.d/sm120-nvidia.sources"
    ),
    "nvidia_repository: the source is believed by its own key only": (
        "echo x >> /etc/apt/keyrings/sm120-nvidia.gpg"
    ),
    "nccl: programs on the host get the settings": "echo NCCL_DEBUG=INFO >> /etc/nccl.conf",
    "nccl: containers get the settings": "rm /etc/sm120/nccl.env",
    "host_tuning: the kernel knobs are in effect": "echo 60 > /proc/sys/vm/swappiness",
    "host_tuning: the governor is set at each boot": "systemctl disable sm120-governor",
    "host_tuning: the clock is kept": "systemctl stop chrony",
    "host_tuning: its files are as written": "echo x=1 >> /etc/sysctl.d/60-sm120.conf",
    "host_tuning: updates at night stay away from the driver": (
        "echo '#clear Unattended-Upgrade::Package-Blacklist;' > /etc/apt/apt.conf.d/99-mine"
    ),
    "host: no change waits for a reboot": "mkdir -p /run/sm120/reboot; touch /run/sm120/reboot/x",
}


def test_what_is_broken_on_one_node_is_named_there_and_repaired_by_the_next_run(
    site: Site, provisioned: Ended
) -> None:
    assert provisioned.code == 0
    for script in BREAKS.values():
        site.second.shell(script)
    found = verify(site)
    assert found.code == 109, found.err
    assert found.rows("v1", "failed", "unknown") == set()
    assert found.rows("v2", "failed") == set(BREAKS)
    assert found.rows("v2", "unknown") == set()
    assert all(r["cure"] for r in found.host("v2")["rows"] if r["verdict"] == "failed")
    moved = {d["field"] for d in found.host("v2")["drift"]}
    assert {"kernel.swappiness", "software.nccl_conf"} <= moved
    assert found.host("v1")["drift"] == []

    site.second.shell("rm /etc/apt/apt.conf.d/99-mine /run/sm120/reboot/x")
    again = command(site, "provision")
    assert again.code == 0, again.out[-3000:] + again.err
    assert "v2 moved: kernel.swappiness: 60 -> 0" in again.out
    assert "v1: no fact moved in this run" in again.out


def test_a_node_that_is_down_is_not_reached_and_the_other_is_judged(
    site: Site, provisioned: Ended
) -> None:
    assert provisioned.code == 0
    site.second.stop()
    try:
        found = verify(site)
    finally:
        site.second.start()
    assert found.code == 110
    assert found.host("v2")["verdict"] == "not reached"
    assert found.host("v2")["rows"] == []
    assert found.host("v1")["verdict"] == "passed"
    assert "not reached: v2" in found.err


def test_a_wrong_sudo_password_and_none_at_all_leave_nothing_called_passed(
    site: Site, provisioned: Ended
) -> None:
    assert provisioned.code == 0
    for password, words in (("wrong", "does not accept"), ("", "asks for a password")):
        found = verify(site, "--limit", "v1", ansible_become_password=password)
        assert found.code == 110
        assert words in found.host("v1")["unreached"]


def test_a_lock_that_answers_another_wish_stops_before_any_host_is_asked(
    site: Site, tmp_path: Path
) -> None:
    wish = site.checkout / "lockfiles" / "host.yaml"
    kept = wish.read_text()
    try:
        wish.write_text(kept.replace("branch: 580", "branch: 590"))
        ended = command(site, "provision")
    finally:
        wish.write_text(kept)
    assert ended.code == 12
    assert "PLAY" not in ended.out
