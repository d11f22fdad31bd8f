"""`sm120 host …` over a site, as a user runs it; two hosts that were provisioned so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.site import Site, new_site
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.forked import run_forked
from tests.testbed.nodes import Node
from tests.testbed.playbook import ROOT, Run, write_inventory
from tests.testbed.snapshot import snapshot

# a play's own keywords know no variables of the inventory
AT_ONCE = ("-e", "sm120_batches=100%")
PARTS = ["nvidia_driver", "pcie", "nccl", "container_runtime", "host_tuning"]
# A node shares its kernel with the machine that runs the tests, whose own swap must stay: what the
# kernel swaps to, `swapon` and `swapoff` are stand-ins. The unit `swap.target` is systemd's own.
_HEAD = "Filename\tType\tSize\tUsed\tPriority"
SWAP = "/swapfile\tfile\t1048572\t0\t-2"
# both are called with --all; the file is written in place, as it is bound to /proc/swaps
STAND_IN = f"""
test -e /root/swaps || printf '{_HEAD}\\n{SWAP}\\n' > /root/swaps
mountpoint --quiet /proc/swaps || mount --bind /root/swaps /proc/swaps
printf '#!/bin/sh\\nprintf "{_HEAD}\\\\n" > /root/swaps\\n' > /usr/local/sbin/swapoff
printf '#!/bin/sh\\nprintf "{_HEAD}\\\\n{SWAP}\\\\n" > /root/swaps\\n' > /usr/local/sbin/swapon
chmod 755 /usr/local/sbin/swapoff /usr/local/sbin/swapon
"""


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
    inventory = write_inventory(
        site.tmp / "inventory.json",
        site.fleet,
        {**site.values, **values},
        host_values=site.host_values,
    )
    link = site.checkout / "ansible"
    if not link.exists():
        link.symlink_to(ROOT / "ansible")
    where = ("--checkout", str(site.checkout))
    done = run_forked(*where, "host", words[0], "-i", str(inventory), *words[1:])
    return Ended(done.returncode, done.stdout, done.stderr)


def verify(site: Site, *words: str, **values: Any) -> Ended:
    return command(site, "verify", "--json", *words, **values)


@dataclass(frozen=True)
class Hosts:
    """Two hosts after a run in check mode and the first run of the whole command.

    The first has every usual role. The second has those that need no reboot, and its swap is off.
    """

    site: Site
    fresh: list[str]  # the second, before any play touched it
    checked: Run
    after_check: list[str]
    first_run: Ended

    def whole(self) -> list[Node]:
        """The nodes with every usual role."""
        return [n for n in self.site.fleet.nodes if n.name not in self.site.host_values]


@contextmanager
def provisioned_hosts(daemon: DockerDaemon, tmp: Path, *, both_whole: bool) -> Iterator[Hosts]:
    """Two fresh nodes, provisioned; `both_whole` takes half of the time more."""
    with new_site(daemon, tmp, ["n1", "n2"]) as site:
        if not both_whole:
            few = {"sm120_parts": ["nccl", "host_tuning"], "host_tuning_swap": "off"}
            site.host_values["n2"] = few
            site.second.shell(STAND_IN)
        fresh = snapshot(site.second)
        checked = site.run("--check", "--diff", "--limit", "n2", sm120_parts=PARTS)
        after_check = snapshot(site.second)
        site.first.shell(
            "apt-get --quiet update; apt-get --quiet --yes install linux-image-stand-in"
        )
        yield Hosts(site, fresh, checked, after_check, command(site, "provision", *AT_ONCE))
