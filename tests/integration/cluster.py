"""A cluster of two nodes: the role slurm on systems of the testbed, and gates over it.

Real: apt, munge, slurmctld, slurmd, srun, cgroups of the version that this machine mounts.
Stand-ins: GPUs, which are devices without a driver.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.site import Site, unlocked_site
from tests.testbed.debian import System, bring_packages
from tests.testbed.docker_node import REMOUNT
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.nodes import USER, Node
from tests.testbed.playbook import ROOT

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
BUILT = ("images", "oci", "layers", "contents", "plans")  # what the store has of built images
STORES = ("sm120", "serial", "chunked", "killed", "hung")
PYTHON = f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={ROOT} {sys.executable} -m pipeline"


@dataclass(frozen=True)
class Judged:
    """Some cases of a gate, and how many of them make a job."""

    gate: str
    cases: str
    chunk: int

    @property
    def words(self) -> tuple[str, ...]:
        of_gate = ("--only", self.gate, "--case", self.cases)
        return ("gate", "run", "sglang-k2", *of_gate, "--offline", "--json")


@dataclass
class Cluster:
    """Two nodes, the first of which has the queue, and their stores."""

    site: Site
    tmp: Path

    @property
    def head(self) -> Node:
        return self.site.first

    def serial(self, judged: Judged, store: str) -> dict[str, Any]:
        """The gate on the head alone."""
        return self._run(judged, f"{PYTHON} --store {store} {' '.join(map(repr, judged.words))}")

    def chunked(self, judged: Judged, store: str, *words: str) -> tuple[dict[str, Any], str]:
        """The gate over the cluster, and what it said on the way."""
        node, chunk = "/usr/local/bin/sm120-node", str(judged.chunk)
        words = ("--on", "slurm:all", "--chunk", chunk, "--node-command", node, *words)
        line = f"{PYTHON} --store {store} {' '.join(map(repr, (*judged.words, *words)))}"
        result = self._run(judged, f"{line} 2>/tmp/said")
        return result, self.head.shell("cat /tmp/said")

    def _run(self, judged: Judged, line: str) -> dict[str, Any]:
        begun = time.monotonic()
        text = self.head.shell(f"cd {ROOT} && su {USER} -c {json.dumps(line)}", check=False)
        start = text.find("{")
        assert start >= 0, text + self.head.shell("cat /tmp/said || :")
        result: dict[str, Any] = json.loads(text[start:])[judged.gate]
        place = "the cluster" if "'--on'" in line else "one node"
        print(f"{judged.gate} on {place}: {time.monotonic() - begun:.0f} s")
        return result

    def answers(self, store: str) -> list[str]:
        return sorted(self.head.shell(f"ls {store}/gate/answers").split())

    def jobs(self) -> list[str]:
        """Every job that has ended, as the queue wrote it down."""
        log = self.head.shell("cat /var/log/slurm/jobcomp.log || :")
        return [line for line in log.splitlines() if "Name=sm120-" in line]

    def state_of(self, node: str, wanted: str) -> str:
        """What the queue has a node for, after it had a minute to become what is wanted."""
        deadline, look = time.monotonic() + 60, f"sinfo --noheader --nodes={node} --format=%T"
        while (found := self.head.shell(look).strip()) != wanted and time.monotonic() < deadline:
            time.sleep(1)
        return found

    def work_on(self, node: str) -> str:
        """The jobs that run on a node now."""
        return self.head.shell(f"squeue --noheader --states=running --nodelist={node}", check=False)


def with_tool(settings: dict[str, Any]) -> dict[str, Any]:
    """Nodes see this checkout and its Python at the same paths, read-only."""
    folders = {str(ROOT), sys.prefix, str(Path(sys.executable).resolve().parent.parent)}
    binds = [f"{folder}:{folder}:ro" for folder in sorted(folders)]
    # one with torch has gigabytes
    environments = STORE / "gate" / "environments"
    binds += [f"{environments}:/srv/{name}/gate/environments:ro" for name in STORES]
    # folders of a store must not be links
    binds += [f"{STORE / name}:/srv/rebuilt/{name}:ro" for name in BUILT if (STORE / name).is_dir()]
    return {**settings, "binds": [*binds, f"{STORE}:/srv/store:ro"]}


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
    node.shell(
        "systemd-tmpfiles --create /usr/lib/tmpfiles.d/gpus.conf; chmod 711 /root;"
        " cp -a /srv/store/gate/engines /srv/engines;"
        f" for name in {' '.join(STORES)}; do cp /srv/store/store.json /srv/$name;"
        # links: thousands of files
        " cp -al /srv/engines /srv/$name/gate;"
        f" chown {USER}: /srv/$name /srv/$name/gate /srv/$name/store.json; done;"
        f" chown -R {USER}: /srv/engines"
    )
