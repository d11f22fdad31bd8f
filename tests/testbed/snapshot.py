"""What a node is, as lines to compare: packages, files, units, kernel knobs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.testbed.nodes import Node

# What is alive by itself, or is looked at by another line.
UNSEEN = (
    *("/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/var/log", "/var/cache"),
    *("/var/lib/dpkg", "/var/lib/apt/lists", "/var/lib/systemd", "/var/lib/sudo"),
    *("/home", "/root/.ansible"),
)
LOOK = r"""
dpkg-query -W -f 'package ${binary:Package} ${Version} ${Status}\n'
apt-mark showauto | sed 's/^/automatic /'
systemctl list-unit-files --no-legend --no-pager | grep -v ' transient' \
    | awk '{print "unit", $1, $2}'
# but those of whoever is logged in at the moment
systemctl list-units --no-legend --no-pager --plain --state=active --type=service,timer,mount \
    | grep -vE '^(run-user-|user@|user-runtime-dir@)' | awk '{print "active", $1, $4}'
for knob in vm.swappiness vm.max_map_count kernel.numa_balancing net.core.somaxconn; do
    sysctl "$knob" 2>/dev/null | sed 's/^/knob /'
done
echo "cmdline $(cat /proc/cmdline)"
echo "driver $(cat /proc/driver/nvidia/version 2>/dev/null)"
find / -xdev UNSEEN -o -type f -print0 | xargs -0 sha256sum | awk '{print "file", $2, $1}'
find / -xdev UNSEEN -o \( -type f -o -type d \) -printf 'mode %p %M %u:%g\n' \
    -o -type l -printf 'link %p %l\n'
"""


def snapshot(node: Node) -> list[str]:
    """The node as sorted lines."""
    unseen = " -o ".join(f"-path {place} -prune" for place in UNSEEN)
    return sorted(node.shell(LOOK.replace("UNSEEN", unseen), check=False).splitlines())


def differences(before: Sequence[str], after: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Lines that came (+) or went (-), but those that match an allowed pattern."""
    came = [f"+{line}" for line in sorted(set(after) - set(before))]
    went = [f"-{line}" for line in sorted(set(before) - set(after))]
    return [row for row in came + went if not any(re.search(p, row) for p in allowed)]
