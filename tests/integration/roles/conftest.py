"""Roles run by the real Ansible on this machine alone: settings and network stay out."""

from __future__ import annotations

from tests.unit.conftest import stay_at_home

__all__ = ["stay_at_home"]
