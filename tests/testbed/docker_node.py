"""A node with a Docker daemon of its own: this machine's programs, the node's network and disk.

Real: sshd, systemd, dockerd, containerd, runc, published ports. The daemon's programs are mounted
from this machine, as nodes have no way to a package archive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from docker.types import Mount

from tests.testbed.dockerd import PACKAGES, DockerDaemon
from tests.testbed.nodes import USER, Fleet, Node, fleet
from tests.testbed.packages import CannotHave, ensure_debian_packages, find_program

PROGRAMS = ("dockerd", "containerd", "containerd-shim-runc-v2", "runc", "docker-proxy", "docker")
DATA = "/var/lib/docker"
READY_TIMEOUT_S = 60.0
# Mounted read-only in containers, and made writable for containers inside of this one.
REMOUNT = (
    "for place in $(awk '$3 ~ /^cgroup/ {print $2}' /proc/mounts); do"
    " mount -o remount,rw,bind $place || :; done"
)
UNIT = f"""[Unit]
Description=Docker of a test node
[Service]
ExecStartPre=/bin/sh -c "{REMOUNT.replace("$", "$$")}"
ExecStart=/usr/sbin/dockerd --iptables=false --ip-forward=false --ip-masq=false --group=docker
Delegate=yes
KillMode=process
[Install]
WantedBy=multi-user.target
"""


def with_docker(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a node that can run containers."""
    ensure_debian_packages(PACKAGES)
    files = [Path(find_program(name)) for name in PROGRAMS]
    # of dockerd itself, and in no package that a node has
    files += Path("/lib").glob("*-linux-gnu/libdevmapper.so.*")
    binds = [f"{path}:{path}:ro" for path in files]
    # overlay2 cannot lie on the overlay that is the node's root
    disk = Mount(target=DATA, source=None, type="volume")
    rights = [*settings["cap_add"], "NET_ADMIN"]
    return {**settings, "cap_add": rights, "binds": binds, "mounts": [disk]}


@contextmanager
def docker_node(daemon: DockerDaemon, tar: Path, name: str, tmp: Path) -> Iterator[Fleet]:
    """One node whose Docker answers; its user `ops` may use it."""
    with fleet(daemon, tar, [name], tmp, with_docker) as nodes:
        start_docker(nodes.nodes[0], tmp)
        yield nodes


def start_docker(node: Node, tmp: Path) -> None:
    """As a unit of systemd, like on a real host."""
    units = tmp / "units"
    units.mkdir()
    (units / "docker.service").write_text(UNIT)
    node.put(units, "/etc/systemd/system")
    node.shell(f"groupadd --force docker && usermod --append --groups docker {USER}")
    node.shell("systemctl daemon-reload && systemctl enable --now docker.service")
    deadline = time.monotonic() + READY_TIMEOUT_S
    while "Server Version" not in node.shell("docker info 2>&1", check=False):
        if time.monotonic() > deadline:
            why = node.shell("journalctl --unit docker --no-pager --lines 3", check=False)
            raise CannotHave(f"A node cannot have a Docker of its own here: {why.strip()[-300:]}")
        time.sleep(0.2)
