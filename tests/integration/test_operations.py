"""The roles metrics and health on a node with Slurm: an Xid takes it out of service for real.

Real: apt, the node exporter, systemd's timers and journal, slurmctld, slurmd, a reboot. Stand-ins:
nvidia-smi, and the kernel's lines, which systemd-journal-remote writes into a journal of the node.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.cluster import CONTAINER, KEY, PACKAGES, cgroup_plugin
from tests.integration.host_command import verify
from tests.integration.site import Site, unlocked_site
from tests.testbed.debian import bring_packages
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.nodes import Node
from tests.unit.ansible.test_gpu_metrics import H200
from tests.unit.ansible.test_health_probe import LOST

pytestmark = [pytest.mark.big, pytest.mark.timeout(1800)]
ONLY = ("--tags", "slurm,metrics,health")
MARK = "/run/sm120/out-of-service"
ASK = (
    "python3 -c 'import urllib.request as u;"
    ' print(u.urlopen("http://127.0.0.1:9100/metrics").read().decode())\''
)
STATE = "sinfo --noheader --format=%T"


@pytest.fixture(scope="module")
def site(docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One node, which has the queue and does the work."""
    tmp = tmp_path_factory.mktemp("operations")
    checkout = tmp / "checkout"
    for folder in ("lockfiles", "images"):
        (checkout / folder).mkdir(parents=True)
    with ExitStack() as stack:
        site = stack.enter_context(unlocked_site(docker_daemon, tmp, ["n1"], checkout))
        site.lock()
        wanted = (*PACKAGES, "prometheus-node-exporter", "systemd-journal-remote")
        site.archive.stanzas += bring_packages(site.archive.root, wanted, site.system).values()
        site.archive.publish()
        drop_in = "/usr/lib/systemd/system/slurmd.service.d"
        site.first.shell(
            f"mkdir -p {drop_in}; cat >{drop_in}/container.conf <<'END'\n{CONTAINER}END\n"
            f"cat >/usr/bin/nvidia-smi <<'END'\n#!/bin/sh\necho '{H200}'\nEND\n"
            "chmod 755 /usr/bin/nvidia-smi; apt-get update --quiet"
            " && apt-get install --quiet --yes --no-install-recommends systemd-journal-remote"
        )
        site.values |= {
            "sm120_parts": ["slurm", "metrics", "health"],
            "slurm_head": "n1",
            "slurm_munge_key": KEY,
            "slurm_node_timeout_s": 10,
            "slurm_cgroup": {"ConstrainDevices": "no", **cgroup_plugin()},
            "health_every_s": 5,
            "metrics_every_s": 5,
        }
        yield site


def kernel_says(node: Node, name: str, *texts: str) -> None:
    """Lines of the kernel of this boot, in a journal of the node."""
    boot = node.shell("tr -d - </proc/sys/kernel/random/boot_id").strip()
    # lines of one boot are ordered by the time since it: with a smaller one they would be old
    start, since_boot = int(time.time() * 1e6), int(time.monotonic() * 1e6)
    entries = "\n".join(
        f"__REALTIME_TIMESTAMP={start + n}\n__MONOTONIC_TIMESTAMP={since_boot + n}\n"
        f"_BOOT_ID={boot}\n"
        f"_TRANSPORT=kernel\nMESSAGE={text}\n"
        for n, text in enumerate(texts)
    )
    node.shell(
        f"cat >/tmp/entries <<'END'\n{entries}\nEND\n"
        'folder=/var/log/journal/$(cat /etc/machine-id); mkdir -p "$folder"\n'
        f'/lib/systemd/systemd-journal-remote -o "$folder/{name}.journal" /tmp/entries'
    )


def until(node: Node, command: str, wanted: str, limit_s: float = 180) -> str:
    end = time.monotonic() + limit_s
    while wanted not in (found := node.shell(command, check=False)):
        assert time.monotonic() < end, f"{command}: {found}"
        time.sleep(1)
    return found


def test_an_xid_takes_a_host_out_of_service_until_a_person_brings_it_back(site: Site) -> None:
    node = site.first
    site.run("--check", "--diff", "--tags", "metrics,health").require_good()
    assert "sm120" not in node.shell("ls /usr/local/sbin /etc/systemd/system")
    site.run(*ONLY).require_good()
    assert site.run(*ONLY).require_good().count("changed") == 0
    until(node, ASK, 'sm120_gpu_power_draw_watts{address="0000:00:06",gpu="0"} 91.72')
    until(node, ASK, "sm120_host_out_of_service 0")
    kernel_says(node, "harmless", "hello", "NVRM: Xid (PCI:0000:c1:00): 31, pid=7, name=vllm")
    until(node, ASK, 'sm120_gpu_xids_total{address="0000:c1:00",xid="31"} 1')
    until(node, STATE, "idle")
    before = verify(site)
    assert "health: the host is in service" in before.rows("n1", "passed")
    ours = {
        row for row in before.rows("n1", "failed", "unknown") if row[:6] in ("metric", "health")
    }
    # no card answers `nvidia-smi -q -x` here
    assert ours == {"metrics: the numbers of the gpus are served and fresh"}

    kernel_says(node, "fatal", LOST)
    until(node, f"cat {MARK}", "Xid 79 at 0000:c1:00")
    until(node, STATE, "drained")
    assert "sm120-health: Xid 79 at 0000:c1:00" in node.shell("sinfo --noheader --format=%E")
    until(node, ASK, "sm120_host_out_of_service 1")
    assert "health: the host is in service" in verify(site).rows("n1", "failed")
    # the card repeats itself, and the host boots: nothing is done twice, nothing comes back
    kernel_says(node, "again", LOST, LOST)
    node.shell("sm120-health return", check=False)
    assert node.shell(f"cat {MARK}").startswith("Xid 79")
    node.stop()
    node.start()
    until(node, f"cat {MARK}", "Xid 79 at 0000:c1:00")
    until(node, STATE, "drain")

    assert "back in service" in node.shell("sm120-health return")
    until(node, STATE, "idle")
    until(node, "systemctl show sm120-health.service --property=Result", "success")
    assert "No such file" in node.shell(f"ls {MARK}", check=False)
    assert "in service" in node.shell("sm120-health status")


def test_the_roles_give_back_what_they_took(site: Site) -> None:
    values = {"metrics_state": "absent", "health_state": "absent"}
    only = ("--tags", "metrics,health")
    site.run(*only, **values).require_good()
    assert site.run(*only, **values).require_good().count("changed") == 0
    left = site.first.shell(
        "ls -d /usr/local/sbin/* /etc/systemd/system/* /var/lib/sm120/*; ls /run/sm120", check=False
    )
    assert [word for word in left.split() if "health" in word or "gpu-metrics" in word] == []
    assert "out-of-service" not in left
    assert "installed" not in site.first.shell(
        "dpkg-query --show --showformat='${db:Status-Status}' prometheus-node-exporter", check=False
    ).replace("not-installed", "")
