"""Hosts in network namespaces on one switch, each behind a link of a limited rate.

The switch is a bridge in a namespace of its own: Docker's rules drop what a bridge of the
machine's namespace forwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.testbed.packages import CannotHave

# TCP hands over up to 64 kB at a time; a bucket that is smaller would cut every one of them
_BURST, _QUEUE = "128kb", "50ms"


@dataclass(frozen=True)
class RackHost:
    """A namespace with one address."""

    namespace: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """A command that runs there."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def sent_bytes(self) -> int:
        """What left its link so far, headers included."""
        path = "/sys/class/net/link0/statistics/tx_bytes"
        # `ip netns exec` mounts the namespace's own /sys
        return int(_run(*self.inside("cat", path)))


@contextmanager
def rack(n_hosts: int, mbit: int, latency: str = _QUEUE) -> Iterator[list[RackHost]]:
    """So many hosts; both directions of every link carry so many megabits a second."""
    if os.geteuid() or not all(shutil.which(name) for name in ("ip", "tc")):
        raise CannotHave("network namespaces need root, `ip` and `tc`")
    prefix, made = f"rack{os.getpid()}", list[str]()
    switch = f"{prefix}-switch"
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", _BURST, "latency", latency)
    try:
        try:
            _namespace(switch, made)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            hosts = []
            for number in range(1, n_hosts + 1):
                host = RackHost(f"{prefix}-{number}", f"10.77.0.{number}")
                _namespace(host.namespace, made)
                port = f"port{number}"
                pair = ("type", "veth", "peer", "name", port, "netns", switch)
                _run("ip", "-n", host.namespace, "link", "add", "link0", *pair)
                _run(
                    "ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "link0"
                )
                _run("ip", "-n", host.namespace, "link", "set", "link0", "up")
                _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
                _run("tc", "-n", host.namespace, "qdisc", "add", "dev", "link0", *limit)
                _run("tc", "-n", switch, "qdisc", "add", "dev", port, *limit)
                hosts.append(host)
        except subprocess.CalledProcessError as error:
            raise CannotHave(f"no network namespaces here: {error.stderr.strip()}") from error
        yield hosts
    finally:
        for name in made:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _namespace(name: str, made: list[str]) -> None:
    _run("ip", "netns", "add", name)
    made.append(name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
