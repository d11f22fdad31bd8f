"""Who may change what a role owns: a row for each role that the host has."""

from __future__ import annotations

from pipeline.host.promises.look import Host
from pipeline.host.promises.owned import require_root_alone


def test_nobody_but_root_can_change_its_files(host: Host, of_role: str) -> None:
    """Programs that root runs, keys, sources, settings, and every folder above them."""
    require_root_alone(host, of_role)
