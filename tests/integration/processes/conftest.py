"""Real processes in the kernel's own hands: sandboxes, and children that no signal ends."""

from __future__ import annotations

from tests.unit.conftest import new_folder, sm120, stay_at_home
from tests.unit.hosts.conftest import programs, unkillable

__all__ = ["new_folder", "programs", "sm120", "stay_at_home", "unkillable"]
