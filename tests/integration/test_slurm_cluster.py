"""A gate over a cluster that the role slurm made of two nodes: Debian's own Slurm and munge.

Real: apt, munge, slurmctld, slurmd, srun, cgroups (of the version that this machine mounts), the
parser gate of sglang-k2 in its sandbox, a node that loses its power. Stand-ins: GPUs, which are
devices without a driver.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.host_command import verify
from tests.integration.site import Site, unlocked_site
from tests.testbed.debian import BOOKWORM, TRIXIE, System, bring_packages
from tests.testbed.docker_node import REMOUNT
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.nodes import USER, Node
from tests.testbed.playbook import ROOT

pytestmark = [pytest.mark.big, pytest.mark.timeout(3600)]
# Read now: each test has an empty store.
STORE = Path(os.environ.get("SM120_STORE") or Path.home() / ".cache" / "sm120")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
KEY = "0123456789abcdef" * 8
GPUS = 2
# containers get their cgroups read-only; in a folder of packages, where it is no change of a site
CONTAINER = f'[Service]\nExecStartPre=/bin/sh -c "{REMOUNT.replace("$", "$$")}"\n'
DEVICES = "".join(f"c /dev/nvidia{n} 0666 root root - 195:{n}\n" for n in range(GPUS))
# ignores the signal that Slurm sends first
HANGS = """#!/bin/sh
echo '{"node": "here"}'
trap "" TERM
while :; do sleep 1; done
"""
CASES = "kimi-k2/*"
JUDGE = ("gate", "run", "sglang-k2", "--only", "parsers", "--case", CASES, "--offline", "--json")
PYTHON = f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={ROOT} {sys.executable} -m pipeline"


@dataclass
class Cluster:
    """Two nodes, the first of which has the queue, and their stores."""

    site: Site
    tmp: Path

    @property
    def head(self) -> Node:
        return self.site.first

    def serial(self, store: str) -> dict[str, Any]:
        """The gate on the head alone."""
        return self._judged(f"{PYTHON} --store {store} {' '.join(map(repr, JUDGE))}")

    def chunked(self, store: str, *words: str) -> tuple[dict[str, Any], str]:
        """The gate over the cluster, and what it said on the way."""
        node = "/usr/local/bin/sm120-node"
        words = ("--on", "slurm:all", "--chunk", "5", "--node-command", node, *words)
        line = f"{PYTHON} --store {store} {' '.join(map(repr, (*JUDGE, *words)))}"
        result = self._judged(f"{line} 2>/tmp/said")
        return result, self.head.shell("cat /tmp/said")

    def _judged(self, line: str) -> dict[str, Any]:
        text = self.head.shell(f"cd {ROOT} && su {USER} -c {json.dumps(line)}", check=False)
        start = text.find("{")
        assert start >= 0, text + self.head.shell("cat /tmp/said || :")
        result: dict[str, Any] = json.loads(text[start:])["parsers"]
        return result

    def jobs(self) -> list[str]:
        """Every job that has ended, as the queue wrote it down."""
        log = self.head.shell("cat /var/log/slurm/jobcomp.log || :")
        return [line for line in log.splitlines() if "Name=sm120-" in line]

    def work_on(self, node: str) -> str:
        """The jobs that run on a node now."""
        return self.head.shell(f"squeue --noheader --states=running --nodelist={node}", check=False)


def findings(result: dict[str, Any]) -> str:
    """All that was found, without times and whether it was kept."""
    text = json.dumps(result, sort_keys=True, indent=1)
    return re.sub(r'^\s*"(seconds|cached)": .*$', "", text, flags=re.M)


def with_tool(settings: dict[str, Any]) -> dict[str, Any]:
    """Nodes see this checkout and its Python at the same paths, read-only."""
    folders = {str(ROOT), sys.prefix, str(Path(sys.executable).resolve().parent.parent)}
    binds = [f"{folder}:{folder}:ro" for folder in sorted(folders)]
    return {**settings, "binds": [*binds, f"{STORE}:/srv/store:ro"]}


@pytest.fixture(scope="module", params=[BOOKWORM, TRIXIE], ids=["debian-12", "debian-13"])
def cluster(
    request: pytest.FixtureRequest,
    docker_daemon: DockerDaemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Two fresh nodes, to which the first test gives the role."""
    if not (STORE / "gate" / "environments").is_dir():
        pytest.skip("No parser gate was run here: `sm120 gate run sglang-k2 --only parsers`.")
    with ExitStack() as stack:
        tmp = tmp_path_factory.mktemp(request.param.suite)
        yield stack.enter_context(two_nodes(docker_daemon, tmp, request.param))


@contextmanager
def two_nodes(daemon: DockerDaemon, tmp: Path, system: System) -> Iterator[Cluster]:
    """Nodes that are offered Slurm's packages, and an inventory that asks for the role."""
    checkout = tmp / "checkout"
    for folder in ("lockfiles", "images"):
        (checkout / folder).mkdir(parents=True)
    with unlocked_site(daemon, tmp, ["n1", "n2"], checkout, system, with_tool) as site:
        site.lock()
        offered = bring_packages(site.archive.root, PACKAGES, system)
        site.archive.stanzas += offered.values()
        site.archive.publish()
        for node in site.fleet.nodes:
            prepare(node, tmp)
        site.values |= {
            "sm120_parts": ["slurm"],
            "slurm_head": "n1",
            "slurm_munge_key": KEY,
            "slurm_node_timeout_s": 10,
            "slurm_cgroup": {"ConstrainDevices": "no", **cgroup_plugin()},
        }
        yield Cluster(site, tmp)


def cgroup_plugin() -> dict[str, str]:
    """The first version has no sign by which Slurm would know it inside of a container."""
    is_second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    return {} if is_second else {"CgroupPlugin": "cgroup/v1"}


def prepare(node: Node, tmp: Path) -> None:
    """What the role does not bring: devices, a writable cgroup, the tool and the gate's files."""
    parts = tmp / f"parts-{node.name}"
    unit = parts / "usr/lib/systemd/system/slurmd.service.d"
    for folder in (unit, parts / "usr/lib/tmpfiles.d", parts / "usr/local/bin"):
        folder.mkdir(parents=True)
    (unit / "container.conf").write_text(CONTAINER, encoding="utf-8")
    (parts / "usr/lib/tmpfiles.d/gpus.conf").write_text(DEVICES, encoding="utf-8")
    program = parts / "usr/local/bin/sm120-node"
    program.write_text(
        f"#!/bin/sh\nexport {PYTHON.rpartition(' -m')[0].rpartition(' ')[0]}\n"
        f'exec {sys.executable} -m pipeline --store /srv/sm120 "$@"\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    (parts / "usr/local/bin/hangs").write_text(HANGS, encoding="utf-8")
    (parts / "usr/local/bin/hangs").chmod(0o755)
    node.put(parts, "/")
    # environments without torch are those of parsers and templates, and small
    copied = 'for facts in $(grep -l \'"torch": ""\' /srv/store/gate/environments/*/facts.json); do'
    node.shell(
        "systemd-tmpfiles --create /usr/lib/tmpfiles.d/gpus.conf; chmod 711 /root;"
        " mkdir -p /srv/sm120/gate/environments; cp /srv/store/store.json /srv/sm120;"
        f" {copied} cp -a $(dirname $facts) /srv/sm120/gate/environments; done;"
        " cp -a /srv/store/gate/engines /srv/sm120/gate;"
        f" chown -R {USER}: /srv/sm120; rm -rf /srv/sm120/gate/answers;"
        " for name in serial chunked killed hung; do cp -al /srv/sm120 /srv/$name; done"
    )


def test_the_role_makes_a_cluster_and_its_second_run_changes_nothing(cluster: Cluster) -> None:
    site = cluster.site
    only = ("--tags", "slurm")
    site.run("--check", "--diff", *only).require_good()
    assert "slurm" not in cluster.head.shell("ls /etc")
    first = site.run(*only).require_good()
    print(f"{site.system.target}: {first.tasks} tasks, {first.seconds:.0f} s")
    assert KEY not in first.text
    assert site.run(*only).require_good().count("changed") == 0
    states = cluster.head.shell("sinfo --noheader --Node --format='%N %T %G'")
    assert states.splitlines() == [f"n{i} idle gpu:sm120:{GPUS}" for i in (1, 2)]
    # the second has no settings of its own
    assert "slurm.conf" not in site.second.shell("ls /etc/slurm")
    see = "srun --nodelist=n2 --gpus=1 printenv CUDA_VISIBLE_DEVICES"
    assert cluster.head.shell(see).strip() == "0"
    proved = verify(site)
    rows = proved.rows("n1", "passed") & proved.rows("n2", "passed")
    assert "slurm: the queue answers this host" in rows
    assert {r for n in ("n1", "n2") for r in proved.rows(n, "failed") if "slurm" in r} == set()


def test_chunks_over_nodes_find_what_one_machine_finds_and_a_second_run_submits_nothing(
    cluster: Cluster,
) -> None:
    alone = cluster.serial("/srv/serial")
    together, said = cluster.chunked("/srv/chunked")
    print(said)
    assert findings(together) == findings(alone)
    assert len(together["cases"]) > 10
    jobs = cluster.jobs()
    assert len(jobs) == -(-len(together["cases"]) // 5)
    assert all("JobState=COMPLETED" in job for job in jobs), jobs
    assert {node for node in ("n1", "n2") if any(f"NodeList={node}" in j for j in jobs)}
    again, said = cluster.chunked("/srv/chunked")
    assert "to Slurm" not in said
    assert findings(again) == findings(alone)
    assert all(case["cached"] for case in again["cases"])
    assert len(cluster.jobs()) == len(jobs)


def test_a_node_that_loses_its_power_loses_and_doubles_nothing(cluster: Cluster) -> None:
    # the answers that the nodes themselves have would end the chunks at once
    for node in cluster.site.fleet.nodes:
        node.shell("rm -rf /srv/sm120/gate/answers")

    def pull() -> None:
        deadline = time.monotonic() + 120
        while not cluster.work_on("n2") and time.monotonic() < deadline:
            time.sleep(0.1)
        cluster.site.second.stop()

    thread = threading.Thread(target=pull)
    thread.start()
    result, said = cluster.chunked("/srv/killed")
    thread.join()
    print(said)
    assert "asked again" in said
    kept, _ = cluster.chunked("/srv/chunked")
    assert findings(result) == findings(kept)
    answers = cluster.head.shell("ls /srv/killed/gate/answers").split()
    assert sorted(answers) == sorted(cluster.head.shell("ls /srv/chunked/gate/answers").split())
    assert len(answers) == len(result["cases"])
    cluster.site.second.start()
    deadline = time.monotonic() + 60
    state = "sinfo --noheader --nodes=n2 --format=%T"
    while (found := cluster.head.shell(state).strip()) != "idle" and time.monotonic() < deadline:
        time.sleep(1)
    assert found == "idle"


def test_a_job_that_hangs_ends_at_its_limit_and_is_named(cluster: Cluster) -> None:
    words = ("--node-command", "/usr/local/bin/hangs", "--time-limit", "1m", "--chunk", "100")
    result, _ = cluster.chunked("/srv/hung", *words)
    assert {case["verdict"] for case in result["cases"]} == {"unknown"}
    message = result["cases"][0]["message"]
    assert "ended on here by its limit of 1 min, or was cancelled or killed" in message, message
    left = [n.shell("ps ax | grep -c '[/]hangs' || :").strip() for n in cluster.site.fleet.nodes]
    assert left == ["0", "0"]


def test_a_node_with_another_key_is_named(cluster: Cluster) -> None:
    cluster.site.host_values["n2"] = {"slurm_munge_key": KEY[::-1]}
    run = cluster.site.run("--tags", "slurm", "--limit", "n2")
    assert run.code != 0
    assert "Both need the same slurm_munge_key" in run.text
    assert KEY[::-1] not in run.text
    del cluster.site.host_values["n2"]
    cluster.site.run("--tags", "slurm").require_good()


def test_the_role_can_be_undone(cluster: Cluster) -> None:
    cluster.site.run("--tags", "slurm", slurm_state="absent").require_good()
    for node in cluster.site.fleet.nodes:
        left = "ls /etc/slurm/*.conf /etc/munge/munge.key /usr/sbin/slurmd 2>/dev/null || :"
        assert node.shell(left) == ""
    assert (
        cluster.site.run("--tags", "slurm", slurm_state="absent").require_good().count("changed")
        == 0
    )
