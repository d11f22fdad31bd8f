"""A checkout that the commands can build from."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.images.spec.checkout import Checkout
from tests.unit.support import Command, build_tiny, make_checkout, make_wheel


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """One image, `tiny`, whose wheel lies in the folder `mirror`."""
    return make_checkout(tmp_path, [make_wheel(tmp_path / "mirror", "thing")])


@pytest.fixture
def built(checkout: Checkout, sm120: Command) -> str:
    ended = build_tiny(sm120, "--accept", "--json")
    return str(ended.json[0]["digest"])


@pytest.fixture(autouse=True)
def quick_builds(no_slow_helpers: None) -> None:
    """Commands that build start no processes for it."""
