"""Every test file is one that a plain run finds."""

from __future__ import annotations

import ast
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))


def test_no_folder_of_tests_is_passed_over(request: pytest.FixtureRequest) -> None:
    passed_over = request.config.getini("norecursedirs")
    folders = {part for file in FILES for part in file.relative_to(TESTS).parts[:-1]}
    assert [f for f in folders for pattern in passed_over if fnmatch(f, pattern)] == []


def test_no_two_test_files_have_one_name() -> None:
    assert [name for name, n in Counter(file.name for file in FILES).items() if n > 1] == []


def asserts(function: ast.FunctionDef, helpers: frozenset[str] = frozenset()) -> bool:
    """Whether it asserts, expects an error or a skip, or calls a helper that does."""
    for node in ast.walk(function):
        called = ast.unparse(node.func).rpartition(".") if isinstance(node, ast.Call) else None
        if isinstance(node, (ast.Assert, ast.Raise)) or (called and called[2] in helpers):
            return True
        if called and called[0] == "pytest" and called[2] in ("raises", "warns", "fail"):
            return True
    return False


def test_every_test_asserts_something() -> None:
    every = [
        (file, node)
        for file in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    helpers = frozenset(f.name for _, f in every if not f.name.startswith("test_") and asserts(f))
    tests = [(file, f) for file, f in every if file in FILES and f.name.startswith("test_")]
    assert len(tests) > 1000
    silent = [
        f"{file.relative_to(TESTS)}: {f.name}" for file, f in tests if not asserts(f, helpers)
    ]
    assert not silent, "\n".join(silent)
