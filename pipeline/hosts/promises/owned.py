"""The files that each role owns: only root writes them, and they go when the role is undone."""

from __future__ import annotations

from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none

_SYSTEMD = "/etc/systemd/system"
_PINS = "/etc/apt/preferences.d"
# must be gone when the role is undone
LEFT = {
    "nvidia_repository": [
        "/etc/apt/sources.list.d/sm120-nvidia.sources",
        *("/etc/apt/keyrings/sm120-nvidia.gpg", "/etc/apt/keyrings/sm120-nvidia.asc"),
    ],
    "nvidia_driver": [
        *(f"{_PINS}/sm120-driver.pref", "/etc/modprobe.d/sm120-nouveau.conf"),
        "/var/lib/sm120/packages/driver",
    ],
    "cuda": [f"{_PINS}/sm120-cuda.pref"],
    "pcie": [
        *("/etc/default/grub.d/60-sm120.cfg", "/etc/modprobe.d/sm120-pcie.conf"),
        *(f"{_SYSTEMD}/sm120-acs.service", "/usr/local/sbin/sm120-acs"),
    ],
    "nccl": ["/etc/sm120", "/usr/local/lib/sm120", f"{_PINS}/sm120-nccl.pref"],
    "container_runtime": [
        f"{_PINS}/sm120-container_toolkit.pref",
        "/etc/containers/containers.conf.d/60-sm120.conf",
    ],
    "host_tuning": [
        *("/etc/sysctl.d/60-sm120.conf", "/etc/apt/apt.conf.d/60sm120-keep-driver"),
        *(f"{_SYSTEMD}/sm120-governor.service", f"{_SYSTEMD}/sm120-power-limit.service"),
        f"{_SYSTEMD}/sm120-clocks.service",
    ],
    "registry": ["/etc/sm120-registry", f"{_SYSTEMD}/docker-registry.service.d"],
    "weights": [
        *("/opt/sm120", f"{_SYSTEMD}/sm120-scrub.timer"),
        f"{_SYSTEMD}/sm120-scrub.service",
    ],
    "slurm": [
        *("/etc/slurm/slurm.conf", "/etc/slurm/gres.conf", "/etc/slurm/cgroup.conf"),
        f"{_SYSTEMD}/slurmd.service.d/sm120.conf",
    ],
    "engine": ["/var/lib/sm120-engine"],
    "metrics": [
        "/usr/local/sbin/sm120-gpu-metrics",
        f"{_SYSTEMD}/prometheus-node-exporter.service.d/sm120.conf",
        *(f"{_SYSTEMD}/sm120-gpu-metrics.service", f"{_SYSTEMD}/sm120-gpu-metrics.timer"),
    ],
    "health": [
        *("/usr/local/sbin/sm120-health", "/var/lib/sm120/health", "/run/sm120/out-of-service"),
        *(f"{_SYSTEMD}/sm120-health.service", f"{_SYSTEMD}/sm120-health.timer"),
    ],
}
# written or read as root by a role, but not its own or gone after a boot
_USED = {
    "nvidia_repository": ["/var/lib/sm120"],
    "pcie": ["/run/sm120/acs", "/etc/default/grub"],
    "nccl": ["/etc/nccl.conf"],
    "container_runtime": [
        *("/etc/docker/daemon.json", "/etc/docker/certs.d"),
        "/etc/containers/certs.d",
    ],
    "host_tuning": ["/run/sm120/governor"],
}
OWNED = {role: [*paths, *_USED.get(role, [])] for role, paths in LEFT.items()}
# Users beside root that may own files of a role: the package's unit runs as its own user, who
# reads certificates and passwords.
OWNERS = {"registry": "docker-registry"}

# lists what users other than root can change: these paths, what is below them, folders above
LOOSE = """
import os, pwd, stat, sys
def name(uid):
    try: return pwd.getpwuid(uid).pw_name
    except KeyError: return str(uid)
def fault(path, owners):
    seen = os.lstat(path)
    if stat.S_ISLNK(seen.st_mode): return
    if name(seen.st_uid) not in owners: return "%s belongs to %s" % (path, name(seen.st_uid))
    if seen.st_mode & 0o022: return "%s has mode %04o" % (path, stat.S_IMODE(seen.st_mode))
def above(path):
    while path != "/":
        path = os.path.dirname(path)
        yield path
def below(path):
    yield path
    for place, folders, files in os.walk(path):
        for one in folders + files: yield os.path.join(place, one)
owners, faults = sys.argv[1].split(","), []
for path in filter(os.path.lexists, sys.argv[2:]):
    if os.path.islink(path): faults.append("%s is a link to %s" % (path, os.readlink(path)))
    places = [path, os.path.realpath(path)]
    faults += [fault(p, ["root"]) for place in places for p in above(place)]
    faults += [fault(p, owners) for p in below(places[1]) if os.path.lexists(p)]
print("\\n".join(dict.fromkeys(filter(None, faults))))
"""


def test_nobody_but_root_can_change_its_files(host: Host, role: str) -> None:
    """Programs that root runs, keys, sources, settings, and every folder above them."""
    owners = ",".join(["root", *([OWNERS[role]] if role in OWNERS else [])])
    command = f"python3 -c %s {owners} {' '.join(OWNED[role])}"
    output = checks.output_of(host, "owners and modes cannot be read", command, LOOSE)
    fix = (
        "`chown root:root` and `chmod go-w` what is named (replace a link by the file), then run "
        "the playbook again: somebody else could have changed what is in it."
    )
    require_none(list(filter(None, output.splitlines())), "others can change it", fix)


def test_nothing_of_the_role_is_left(host: Host, role: str) -> None:
    """Its files are gone, and the driver is not loaded any more."""
    checks.require_gone(host, LEFT[role])
    if role == "nvidia_driver":
        loaded = host.file("/proc/driver/nvidia/version").exists
        require(not loaded, "the driver is still loaded", "Reboot the host.")
