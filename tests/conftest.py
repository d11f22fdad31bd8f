"""Options for the whole test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--big`: also the tests that need the engine images."""
    parser.addoption("--big", action="store_true", help="test the engine images too (gigabytes)")
