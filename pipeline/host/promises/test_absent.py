"""Roles that were undone: nothing of theirs is left."""

from __future__ import annotations

from pipeline.host.fleet.promised import Promised
from pipeline.host.promises.answers import require
from pipeline.host.promises.look import Host, require_gone

_SYSTEMD = "/etc/systemd/system"
_PINS = "/etc/apt/preferences.d"
LEFT = {
    "nvidia_repository": [
        "/etc/apt/sources.list.d/sm120-nvidia.sources",
        *("/etc/apt/keyrings/sm120-nvidia.gpg", "/etc/apt/keyrings/sm120-nvidia.asc"),
    ],
    "nvidia_driver": [f"{_PINS}/sm120-driver.pref", "/etc/modprobe.d/sm120-nouveau.conf"],
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
    ],
    "registry": ["/etc/sm120-registry", f"{_SYSTEMD}/docker-registry.service.d"],
    "weights": [
        *("/opt/sm120", f"{_SYSTEMD}/sm120-scrub.timer"),
        f"{_SYSTEMD}/sm120-scrub.service",
    ],
}


def test_nothing_of_the_role_is_left(host: Host, promised: Promised, undone: str) -> None:
    """Its files are gone, and the driver is not loaded any more."""
    require_gone(host, LEFT[undone])
    if undone == "nvidia_driver":
        loaded = host.file("/proc/driver/nvidia/version").exists
        require(not loaded, "the driver is still loaded", "Reboot the host.")
