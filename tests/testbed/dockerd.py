"""A private Docker daemon: own data, own socket, own bridge, gone when the block ends."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.packages import CannotHave, ensure_debian_packages, find_program
from tests.testbed.programs import daemon, last_words, run_program, wait_for

PACKAGES = ("docker.io", "iproute2")
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
# Bridges take a /24 of this range that no interface of the machine holds.
BRIDGE_RANGE = ipaddress.IPv4Network("10.213.0.0/16")

# overlay2 cannot lie on every file system (an overlay on an overlay, for one); vfs always can.
WAYS: tuple[tuple[str, ...], ...] = ((), ("--storage-driver=vfs",))


@dataclass(frozen=True)
class DockerDaemon:
    """A running daemon; `gateway` is the machine's address on its bridge."""

    socket_url: str
    gateway: str
    pid: int
    log_file: Path


@contextmanager
def docker_daemon(tmp: Path) -> Iterator[DockerDaemon]:
    """Start a daemon with its data under `tmp`; end it and take away its mounts after."""
    if os.geteuid() != 0:
        raise CannotHave("A private Docker daemon needs root.")
    ensure_debian_packages(PACKAGES)
    data = tmp / "dockerd"
    # Sockets have paths of at most 107 bytes, so they live in a short folder of their own.
    run = Path(tempfile.mkdtemp(prefix="sm120-", dir="/tmp"))
    try:
        with bridge() as (name, gateway), started(data, run, name, gateway) as daemon:
            yield daemon
    finally:
        for folder in (run, data):
            unmount_below(folder)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def bridge() -> Iterator[tuple[str, str]]:
    """A network bridge of our own: two daemons on one docker0 hand out the same addresses."""
    name = f"sm120-{os.getpid() % 10**5}-{time.monotonic_ns() % 1000}"
    gateway = free_gateway()
    try:
        run_program("ip", "link", "add", "name", name, "type", "bridge")
        run_program("ip", "addr", "add", f"{gateway}/24", "dev", name)
        run_program("ip", "link", "set", name, "up")
        yield name, gateway
    finally:
        with suppress(CannotHave):
            run_program("ip", "link", "delete", name)


def free_gateway() -> str:
    """The first address of some subnet that no interface of this machine uses."""
    interfaces = json.loads(run_program("ip", "-json", "-4", "addr", "show"))
    taken = [
        ipaddress.IPv4Interface(f"{info['local']}/{info['prefixlen']}").network
        for interface in interfaces
        for info in interface.get("addr_info", ())
    ]
    subnets = BRIDGE_RANGE.subnets(new_prefix=24)
    free = [s for s in subnets if not any(s.overlaps(other) for other in taken)]
    if not free:
        raise CannotHave(f"Every subnet of {BRIDGE_RANGE} is in use.")
    # any of them: two test runs that look at the same moment must not take the same one
    return str(random.SystemRandom().choice(free)[1])


@contextmanager
def started(data: Path, run: Path, bridge_name: str, gateway: str) -> Iterator[DockerDaemon]:
    """The daemon, in the first of WAYS that this machine allows."""
    data.mkdir(parents=True, exist_ok=True)
    log_file, sock = data / "dockerd.log", run / "docker.sock"
    reasons = []
    for way in WAYS:
        command = dockerd_command(data, run, bridge_name, way)
        try:
            with daemon(command, log_file, STOP_TIMEOUT_S) as process:
                if wait_for(process, lambda: answers_ping(sock), READY_TIMEOUT_S):
                    yield DockerDaemon(f"unix://{sock}", gateway, process.pid, log_file)
                    return
                reasons.append(last_words(log_file))
        finally:
            end_containerd(run / "exec" / "containerd" / "containerd.pid")
    raise CannotHave(f"dockerd does not start here: {' | '.join(reasons)}")


def dockerd_command(data: Path, run: Path, bridge_name: str, way: Sequence[str]) -> list[str]:
    """A daemon that leaves the machine's firewall and routing, and other daemons, alone."""
    config = run / "daemon.json"
    config.write_text("{}\n")
    return [
        find_program("dockerd"),
        # An empty one: the machine's own daemon.json may name what we name here.
        f"--config-file={config}",
        f"--data-root={data}/root",
        f"--exec-root={run}/exec",
        f"--pidfile={run}/dockerd.pid",
        f"--host=unix://{run}/docker.sock",
        f"--bridge={bridge_name}",
        "--iptables=false",
        "--ip-forward=false",
        "--ip-masq=false",
        "--shutdown-timeout=5",
        *way,
    ]


def answers_ping(sock: Path) -> bool:
    """Whether a Docker API is behind the socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(str(sock))
            client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in client.recv(64)
        except OSError:
            return False


def end_containerd(pid_file: Path) -> None:
    """End the daemon's own containerd, which outlives a daemon that had to be killed."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        # The number may have been given to another process since.
        if str(pid_file.parent).encode() in command:
            os.kill(pid, signal.SIGKILL)


def unmount_below(folder: Path) -> None:
    """Take away what is still mounted under a folder, deepest first."""
    for mount in reversed(mounts_below(folder)):
        with suppress(CannotHave):
            run_program("umount", "--lazy", mount)


def mounts_below(folder: Path) -> list[str]:
    """Mount points under a folder, in the order they were made."""
    rows = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [re.sub(r"\\([0-7]{3})", from_octal, row.split()[4]) for row in rows]
    return [point for point in points if Path(point).is_relative_to(folder)]


def from_octal(match: re.Match[str]) -> str:
    """The character that mountinfo writes as a backslash and three digits."""
    return chr(int(match[1], 8))
