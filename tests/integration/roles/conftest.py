"""Roles run by the real Ansible on this machine alone: settings and network stay out."""

from __future__ import annotations

from tests.unit.conftest import new_folder, stay_at_home

__all__ = ["new_folder", "stay_at_home"]
