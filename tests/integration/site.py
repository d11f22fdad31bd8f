"""Two fresh nodes, a signed repository and a lock: everything a provisioning run needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pipeline.artifacts.store.store import default_root
from tests.testbed.apt_repository import (
    AptRepository,
    give_source,
    new_repository,
    nvidia_packages,
    served,
    system_packages,
)
from tests.testbed.debian import BOOKWORM, System, bring_packages
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.forked import run_forked
from tests.testbed.nodes import PASSWORD, Fleet, Node, base_tar, fleet
from tests.testbed.playbook import (
    ROLLBACK,
    ROOT,
    Run,
    ansible_program,
    run_playbook,
    write_inventory,
)
from tests.testbed.signer import new_signer

# What a node keeps when every role was taken back, and why that is right.
LEFT = (
    r"^[+-]file /var/lib/apt/extended_states ",  # apt's own notes; `automatic` lines are compared
    r"^[+-]file /etc/ld.so.cache ",  # packages' triggers write it anew
    r"^[+-]file /boot/grub/grub.cfg ",  # made again; the words of the command line are compared
)


@dataclass
class Site:
    """A fleet with its repositories, its checkout and its inventory."""

    fleet: Fleet
    repository: AptRepository
    archive: AptRepository
    checkout: Path
    tmp: Path
    system: System = BOOKWORM
    values: dict[str, Any] = field(default_factory=dict)
    host_values: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the host's name

    @property
    def first(self) -> Node:
        return self.fleet.nodes[0]

    @property
    def second(self) -> Node:
        return self.fleet.nodes[1]

    def lock(self, target: str | None = None, **driver: Any) -> None:
        """Write the spec and let the real command lock it."""
        spec = yaml.safe_load((ROOT / "lockfiles" / "host.yaml").read_text(encoding="utf-8"))
        spec["driver"] |= driver
        (self.checkout / "lockfiles" / "host.yaml").write_text(yaml.safe_dump(spec))
        place = ["--repository", self.repository.url, "--keyring", str(self.repository.keyring)]
        wanted = ["--target", target or self.system.target, *place]
        run_forked("--checkout", str(self.checkout), "host", "lock", *wanted).check_returncode()

    def offer(self, package: str) -> None:
        """Put a real package of Debian's into the nodes' archive."""
        self.archive.take(package, bring_packages(self.archive.root, [package], self.system))

    def run(self, *args: str, password: str = PASSWORD, **values: Any) -> Run:
        """One run of the playbook over the fleet."""
        return run_playbook(self.inventory(password), *args, **values)

    def roll_back(self, *args: str, **values: Any) -> Run:
        """One run of the playbook that goes back to the driver that worked last."""
        return run_playbook(self.inventory(), *args, playbook=ROLLBACK, **values)

    def inventory(self, password: str = PASSWORD) -> Path:
        """All nodes, with the site's variables."""
        place = self.tmp / "inventory.json"
        return write_inventory(
            place, self.fleet, self.values, password=password, host_values=self.host_values
        )


@contextmanager
def new_site(
    daemon: DockerDaemon, tmp: Path, names: Sequence[str], system: System = BOOKWORM
) -> Iterator[Site]:
    """Boot the nodes, serve both repositories and lock."""
    checkout = tmp / "checkout"
    for folder in ("lockfiles", "images"):
        (checkout / folder).mkdir(parents=True)
    with unlocked_site(daemon, tmp, names, checkout, system) as site:
        site.lock()
        yield site


@contextmanager
def unlocked_site(
    daemon: DockerDaemon,
    tmp: Path,
    names: Sequence[str],
    checkout: Path,
    system: System = BOOKWORM,
    with_parts: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Iterator[Site]:
    """The same for a checkout that is there already, and is locked by somebody else."""
    ansible_program("ansible-playbook")
    tar = base_tar(default_root().parent / "sm120-testbed", system)
    with ExitStack() as stack:
        signer = stack.enter_context(new_signer("testbed"))
        nodes = stack.enter_context(fleet(daemon, tar, names, tmp, with_parts))
        repository = new_repository(tmp / "nvidia", signer, nvidia_packages())
        archive = new_repository(tmp / "system", signer, system_packages(system.suite == "trixie"))
        for place in (repository, archive):
            stack.enter_context(served(place, nodes.gateway))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(partial(give_source, repository=archive), nodes.nodes))
        if system.os_release:
            for node in nodes.nodes:
                node.shell(f"printf %s '{system.os_release}' > /usr/lib/os-release")
        site = Site(nodes, repository, archive, checkout, tmp, system)
        site.values |= {
            "nvidia_repository_url": repository.url,
            "nvidia_repository_key": str(repository.keyring),
            "sm120_lock_file": str(checkout / "lockfiles" / "host.lock.yaml"),
            "sm120_free_mib": 100,
            "pcie_profile": "direct",
            "nccl_profile": "latency",
        }
        yield site
