"""What roles own on a host: a row for each role, whether it is there or was undone."""

from __future__ import annotations

from pipeline.host.promises.checks import Host, require_gone
from pipeline.host.promises.outcome import require
from pipeline.host.promises.owned import LEFT, require_root_alone


def test_nobody_but_root_can_change_its_files(host: Host, of_role: str) -> None:
    """Programs that root runs, keys, sources, settings, and every folder above them."""
    require_root_alone(host, of_role)


def test_nothing_of_the_role_is_left(host: Host, undone: str) -> None:
    """Its files are gone, and the driver is not loaded any more."""
    require_gone(host, LEFT[undone])
    if undone == "nvidia_driver":
        loaded = host.file("/proc/driver/nvidia/version").exists
        require(not loaded, "the driver is still loaded", "Reboot the host.")
