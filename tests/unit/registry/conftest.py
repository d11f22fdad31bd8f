"""A small registry behind a door, and a client in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.registry.repository import Repository
from tests.testbed.oci_door import Door, oci_door
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.registry.support import repository_at


@pytest.fixture
def tiny() -> TinyRegistry:
    return TinyRegistry()


@pytest.fixture
def door(tiny: TinyRegistry) -> Iterator[Door]:
    with oci_door(tiny) as running:
        yield running


@pytest.fixture
def repository(door: Door) -> Repository:
    return repository_at(door)
