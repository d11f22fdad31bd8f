"""The small image with its evidence, made once; nobody may change it."""

from __future__ import annotations

import pytest

from tests.unit.verify.world import World, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("recorded"))
