"""Every test file is one that a plain run finds."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))


def test_no_folder_of_tests_is_passed_over(request: pytest.FixtureRequest) -> None:
    passed_over = request.config.getini("norecursedirs")
    folders = {part for file in FILES for part in file.relative_to(TESTS).parts[:-1]}
    assert "build" in folders
    assert [f for f in folders for pattern in passed_over if fnmatch(f, pattern)] == []


def test_no_two_test_files_have_one_name() -> None:
    assert [name for name, n in Counter(file.name for file in FILES).items() if n > 1] == []
