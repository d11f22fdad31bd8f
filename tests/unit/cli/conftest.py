"""A checkout that the commands can build from."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.spec.checkout import Checkout
from tests.unit.support import make_checkout, make_wheel


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """One image, `tiny`, whose wheel lies in the folder `mirror`."""
    return make_checkout(tmp_path, [make_wheel(tmp_path / "mirror", "thing")])
