"""Fresh nodes: systemd, sshd, sudo and apt in containers that can be rebooted.

Real: apt and dpkg, signed repositories, holds, files, units, SSH, sudo, the order of a reboot.
Stand-ins: the kernel's own files, modules and GRUB; a test that leans on one says so in its name.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.types import IPAMConfig, IPAMPool

from pipeline.core.files import locked
from tests.testbed.debian import BOOKWORM, System, local_debian
from tests.testbed.dockerd import DockerDaemon, free_gateway
from tests.testbed.packages import (
    CannotHave,
    ensure_debian_packages,
    find_program,
    system_environment,
)
from tests.testbed.programs import run_program

PACKAGES = ("mmdebstrap", "openssh-client")
USER = "ops"
PASSWORD = "correct-horse"  # of a node that lives for minutes on a bridge without a way out
BOOT_TIMEOUT_S = 180.0
PARTS = Path(__file__).parent / "node"
# no service of these can work without a machine around it
MASKED = (
    *("getty.target", "console-getty.service", "systemd-udevd.service"),
    *("systemd-udev-trigger.service", "systemd-modules-load.service", "dev-hugepages.mount"),
    *("sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-fs-fuse-connections.mount"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer"),
)
INCLUDED = (
    *("apt", "systemd", "systemd-sysv", "dbus", "libpam-systemd"),
    *("openssh-server", "sudo", "openssl"),
    *("python3", "python3-apt", "python3-venv", "kmod", "procps", "iproute2", "ca-certificates"),
)
# run once inside a container of that root
SET_UP = f"""
set -eu
rm -f /etc/apt/sources.list /etc/apt/sources.list.d/* /etc/ssh/ssh_host_* /etc/machine-id
touch /etc/machine-id
systemctl mask {" ".join(MASKED)}
systemctl enable ssh
mkdir -p /etc/default/grub.d /etc/systemd/system/systemd-sysctl.service.d
printf 'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\\nGRUB_CMDLINE_LINUX=""\\n' > /etc/default/grub
printf '[Unit]\\nConditionPathIsReadWrite=\\n' \
    > /etc/systemd/system/systemd-sysctl.service.d/container.conf
useradd --create-home --shell /bin/bash --groups sudo {USER}
# sudo asks for it at every step, and the usual hash is slow on purpose
echo '{USER}:{PASSWORD}' | chpasswd --crypt-method SHA512
chmod 755 /usr/sbin/node-init /usr/sbin/update-grub
mv /usr/sbin/quick_modules.py /usr/lib/python3/dist-packages/
echo 'import quick_modules' > /usr/lib/python3/dist-packages/quick_modules.pth
# now: a test compares what check mode leaves on a fresh node
python3 -m compileall -q /usr/lib/python3/dist-packages/quick_modules.py
for tool in modprobe lsmod; do
    dpkg-divert --quiet --local --rename --divert /sbin/$tool.real --add /sbin/$tool
    printf '#!/bin/sh\\n# stand-in: this node has no kernel of its own\\n' > /sbin/$tool
    chmod 755 /sbin/$tool
done
update-grub
"""


# Runs $2, and says by $1 that this is all of its output, which then lies in that file, too.
SHELL = '/bin/sh -c "$2" >"$1" 2>&1 </dev/null; code=$?; cat "$1"; echo "$1"; exit $code'
SHELL_AGAIN = 'cat "$1" && echo "$1"'


@dataclass(frozen=True)
class Node:
    """One running node, and how to reach it."""

    name: str
    address: str
    container: str
    socket_url: str
    ssh_config: Path

    def shell(self, script: str, *, check: bool = True) -> str:
        """The output of a root shell on the node; not over SSH, so it works whatever SSH does."""
        client = docker.DockerClient(base_url=self.socket_url)
        container = client.containers.get(self.container)
        place = f"/run/shell-{secrets.token_hex(8)}"
        done: Any = container.exec_run(["/bin/sh", "-c", SHELL, "sh", place, script])
        text: str = done.output.decode(errors="replace")
        for _ in range(5):
            if text.endswith(f"{place}\n"):
                break
            # on a busy machine Docker stops reading two seconds after the end, and drops the rest
            with suppress(docker.errors.APIError):  # a node that went down has no more to say
                again: Any = container.exec_run(["/bin/sh", "-c", SHELL_AGAIN, "sh", place])
                text = text if again.exit_code else again.output.decode(errors="replace")
        text = text.removesuffix(f"{place}\n")
        if check and done.exit_code != 0:
            raise AssertionError(f"{self.name}: {script!r} ended with {done.exit_code}: {text}")
        return text

    def put(self, folder: Path, place: str) -> None:
        """Copy a folder's contents to the node."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as out:
            out.add(folder, arcname=".")
        self.shell(f"mkdir -p {place}")
        client = docker.DockerClient(base_url=self.socket_url)
        client.containers.get(self.container).put_archive(place, packed.getvalue())

    def stop(self) -> None:
        """Pull the plug."""
        client = docker.DockerClient(base_url=self.socket_url)
        client.containers.get(self.container).kill()

    def start(self) -> None:
        """Press the button, and wait until sshd answers."""
        client = docker.DockerClient(base_url=self.socket_url)
        client.containers.get(self.container).start()
        wait_for_ssh(self.address)


@dataclass(frozen=True)
class Fleet:
    """Nodes on one bridge; `gateway` is this machine's address on it."""

    gateway: str
    nodes: tuple[Node, ...]
    key_file: Path


def base_tar(cache: Path, system: System = BOOKWORM) -> Path:
    """What a fresh server has, made once for each list of packages."""
    ensure_debian_packages(PACKAGES)
    if os.geteuid() != 0:
        raise CannotHave("The nodes' root file system can only be made by root.")
    spec = " ".join((system.suite, system.architecture, *INCLUDED))
    place = cache / f"node-{hashlib.sha256(spec.encode()).hexdigest()[:16]}.tar"
    # the test processes of a fresh machine come here at once; one makes it, the others wait
    with locked(cache / "node.lock"):
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                # apt's own user must be able to look inside
                Path(scratch).chmod(0o755)
                fresh = Path(scratch, "node.tar")
                bootstrap(fresh, local_debian(Path(scratch), INCLUDED, system), system)
                os.replace(fresh, place)
    return place


def bootstrap(place: Path, source: str, system: System) -> None:
    """One run of mmdebstrap, without documentation and locales."""
    run_program(
        *("mmdebstrap", "--variant=minbase", "--mode=root", "--format=tar"),
        *(f"--architectures={system.architecture}", f"--include={','.join(INCLUDED)}"),
        # whether this machine runs a foreign one's programs shows when the first of them starts
        "--skip=check/qemu",
        *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"),
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        *(system.suite, str(place), source),
    )


@contextmanager
def fleet(
    daemon: DockerDaemon,
    tar: Path,
    names: Sequence[str],
    tmp: Path,
    with_parts: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Iterator[Fleet]:
    """Fresh nodes of these names, booted; gone when the block ends.

    `with_parts` may change the settings of their containers.
    """
    client = docker.DockerClient(base_url=daemon.socket_url, timeout=180)
    key_file = new_key(tmp)
    image = load_image(client, tar)
    gateway = free_gateway()
    base = gateway.rpartition(".")[0]
    pool = IPAMPool(subnet=f"{base}.0/24", gateway=gateway)
    network_name = f"nodes-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    network = client.networks.create(network_name, ipam=IPAMConfig(pool_configs=[pool]))
    nodes: list[Node] = []
    try:
        for number, name in enumerate(names, start=10):
            address = f"{base}.{number}"
            config = ssh_config(tmp, name, address, key_file)
            container = start_node(client, image, network_name, name, address, with_parts)
            nodes.append(Node(name, address, container, daemon.socket_url, config))
        for node in nodes:
            wait_for_ssh(node.address)
            admit(node, key_file)
        yield Fleet(gateway, tuple(nodes), key_file)
    finally:
        for node in nodes:
            client.containers.get(node.container).remove(force=True, v=True)
        network.remove()


def load_image(client: docker.DockerClient, tar: Path) -> str:
    """The node's image: Debian from the tar, set up as a server in a container; once a daemon."""
    ready = f"{tar.stem}:ready"
    if client.images.list(name=ready):
        return ready
    with tar.open("rb") as data:
        client.api.import_image_from_data(data, repository=tar.stem, tag="base")
    made = client.api.create_container(f"{tar.stem}:base", command=["/bin/sh", "-c", SET_UP])
    try:
        client.api.put_archive(made["Id"], "/usr/sbin", parts_tar())
        client.api.start(made["Id"])
        if client.api.wait(made["Id"])["StatusCode"] != 0:
            raise CannotHave(f"A node cannot be set up: {client.api.logs(made['Id'])[-300:]!r}")
        client.api.commit(made["Id"], repository=tar.stem, tag="ready")
    finally:
        client.api.remove_container(made["Id"], force=True)
    return ready


def parts_tar() -> bytes:
    """Our own programs of a node."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as out:
        for name in ("node-init", "update-grub", "quick_modules.py"):
            out.add(PARTS / name, arcname=name)
    return packed.getvalue()


def start_node(
    client: docker.DockerClient,
    image: str,
    network: str,
    name: str,
    address: str,
    with_parts: Callable[[dict[str, Any]], dict[str, Any]],
) -> str:
    """Boot a container as a node; a reboot from inside starts it again."""
    api = client.api
    settings: dict[str, Any] = {
        "cap_add": ["SYS_ADMIN"],
        "cgroupns": "private",
        "restart_policy": {"Name": "always"},
        "tmpfs": {"/run": "exec", "/run/lock": "", "/tmp": ""},
        "security_opt": ["seccomp=unconfined", "apparmor=unconfined"],
    }
    host_config = api.create_host_config(**with_parts(settings))
    endpoint = api.create_endpoint_config(ipv4_address=address)
    made = api.create_container(
        image,
        command=["/usr/sbin/node-init"],
        hostname=name,
        environment={"container": "docker"},
        stop_signal="SIGRTMIN+3",
        host_config=host_config,
        networking_config={"EndpointsConfig": {network: endpoint}},
    )
    api.start(made["Id"])
    return str(made["Id"])


def wait_for_ssh(address: str) -> None:
    """Until sshd sends its banner."""
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, 22), timeout=2) as door:
                if door.recv(4) == b"SSH-":
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise CannotHave(f"The node at {address} does not boot within {BOOT_TIMEOUT_S:.0f} s here.")


def new_key(tmp: Path) -> Path:
    """A throwaway key for SSH."""
    key_file = tmp / "key"
    command = [find_program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(key_file)]
    subprocess.run(command, env=system_environment(), check=True)
    return key_file


def admit(node: Node, key_file: Path) -> None:
    """Let our key in; sudo asks for the password, as on a real host."""
    public = key_file.with_suffix(".pub").read_text().strip()
    home = f"/home/{USER}/.ssh"
    node.shell(
        f"install -d -m 700 -o {USER} -g {USER} {home} && echo '{public}' > {home}/authorized_keys"
        f" && chown {USER}: {home}/authorized_keys"
    )


def ssh_config(tmp: Path, name: str, address: str, key_file: Path) -> Path:
    """How ssh, Ansible and testinfra reach one node."""
    path = tmp / f"ssh-{name}"
    path.write_text(
        f"Host {name}\n  HostName {address}\n  User {USER}\n  IdentityFile {key_file}\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    return path
