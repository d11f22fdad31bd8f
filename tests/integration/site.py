"""Two fresh nodes, a signed repository and a lock: everything a provisioning run needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.cli.common import host_platform
from pipeline.store.store import default_root
from tests.testbed.apt_repository import (
    AptRepository,
    give_source,
    new_repository,
    nvidia_packages,
    served,
    system_packages,
)
from tests.testbed.debian import bring_packages
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.nodes import PASSWORD, Fleet, Node, base_tar, fleet
from tests.testbed.playbook import ROOT, Run, ansible_program, run_playbook, write_inventory
from tests.testbed.signer import new_signer

TARGET = f"debian-12/{host_platform().partition('/')[2]}"
UBUNTU = TARGET.replace("debian-12", "ubuntu-24.04")
# What provisioning may touch; /var/lib/dpkg is looked at through dpkg.
WATCHED = "/etc /usr/local /opt /boot /root /usr/lib/systemd/system"
SNAPSHOT = (
    "dpkg-query -W -f '${binary:Package} ${Version} ${db:Status-Want}\\n';"
    f" find {WATCHED} -type f ! -name ld.so.cache ! -path '/root/.ansible/*'"
    " -exec sha256sum {} + | sort -k 2;"
    f" find {WATCHED} /var/lib/sm120 -type d ! -path '/root/.ansible*' 2>/dev/null | sort;"
    " find /etc -type l -printf '%p %l\\n' | sort"
)


@dataclass
class Site:
    """A fleet with its repositories, its checkout and its inventory."""

    fleet: Fleet
    repository: AptRepository
    checkout: Path
    tmp: Path
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Node:
        return self.fleet.nodes[0]

    @property
    def second(self) -> Node:
        return self.fleet.nodes[1]

    def lock(self, target: str = TARGET, **driver: Any) -> None:
        """Write the wish and let the real command lock it."""
        wish = yaml.safe_load((ROOT / "lockfiles" / "host.yaml").read_text(encoding="utf-8"))
        wish["driver"] |= driver
        (self.checkout / "lockfiles" / "host.yaml").write_text(yaml.safe_dump(wish))
        place = ["--repository", self.repository.url, "--keyring", str(self.repository.keyring)]
        command = ["--checkout", str(self.checkout), "host", "lock", "--target", target, *place]
        subprocess.run([sys.executable, "-m", "pipeline", *command], cwd=ROOT, check=True)

    def run(self, *args: str, password: str = PASSWORD, **values: Any) -> Run:
        """One run of the playbook over the fleet."""
        inventory = write_inventory(
            self.tmp / "inventory.json", self.fleet, self.values, password=password
        )
        return run_playbook(inventory, *args, **values)


@contextmanager
def new_site(daemon: DockerDaemon, tmp: Path, names: Sequence[str]) -> Iterator[Site]:
    """Boot the nodes, serve both repositories and lock."""
    ansible_program("ansible-playbook")
    tar = base_tar(default_root().parent / "sm120-testbed")
    with ExitStack() as stack:
        signer = stack.enter_context(new_signer("testbed"))
        nodes = stack.enter_context(fleet(daemon, tar, names, tmp))
        repository = new_repository(tmp / "nvidia", signer, nvidia_packages())
        system = new_repository(tmp / "system", signer, system_packages())
        system.take("docker-registry", bring_packages(system.root, ["docker-registry"]))
        for place in (repository, system):
            stack.enter_context(served(place, nodes.gateway))
        for node in nodes.nodes:
            give_source(node, system)
        checkout = tmp / "checkout"
        for folder in ("lockfiles", "images"):
            (checkout / folder).mkdir(parents=True)
        site = Site(nodes, repository, checkout, tmp)
        site.values |= {
            "nvidia_repository_url": repository.url,
            "nvidia_repository_key": str(repository.keyring),
            "sm120_lock_file": str(checkout / "lockfiles" / "host.lock.yaml"),
            "sm120_free_mib": 100,
            "pcie_profile": "direct",
            "nccl_profile": "latency",
        }
        site.lock()
        yield site


def snapshot(node: Node) -> list[str]:
    """Packages, files, folders and links of a node, as lines to compare."""
    return node.shell(SNAPSHOT, check=False).splitlines()
