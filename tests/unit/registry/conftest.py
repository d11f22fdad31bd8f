"""A client in front of the small registry."""

from __future__ import annotations

import pytest

from pipeline.artifacts.registry.repository import Repository
from tests.testbed.oci_door import Door
from tests.unit.registry.support import repository_at


@pytest.fixture
def repository(door: Door) -> Repository:
    return repository_at(door)
