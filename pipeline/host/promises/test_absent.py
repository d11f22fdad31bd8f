"""Roles that were undone: nothing of theirs is left."""

from __future__ import annotations

from pipeline.host.fleet.promised import Promised
from pipeline.host.promises.answers import require
from pipeline.host.promises.look import Host, require_gone
from pipeline.host.promises.owned import LEFT


def test_nothing_of_the_role_is_left(host: Host, promised: Promised, undone: str) -> None:
    """Its files are gone, and the driver is not loaded any more."""
    require_gone(host, LEFT[undone])
    if undone == "nvidia_driver":
        loaded = host.file("/proc/driver/nvidia/version").exists
        require(not loaded, "the driver is still loaded", "Reboot the host.")
