"""Every test file is one that a plain run finds."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.conftest import DURATIONS, IN_TURN, part_of

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))


def test_no_folder_of_tests_is_passed_over(request: pytest.FixtureRequest) -> None:
    passed_over = request.config.getini("norecursedirs")
    folders = {part for file in FILES for part in file.relative_to(TESTS).parts[:-1]}
    assert [f for f in folders for pattern in passed_over if fnmatch(f, pattern)] == []


def test_every_part_with_a_duration_is_there() -> None:
    parts = {part_of(str(file.relative_to(TESTS.parent))) for file in FILES}
    assert set(json.loads(DURATIONS.read_text(encoding="utf-8"))) <= parts


def test_every_file_that_takes_turns_is_there_and_has_few_partners() -> None:
    named = [name for row in IN_TURN for name in row]
    # with more, a fault would wait for its turn too long
    assert {len(row) for row in IN_TURN} <= {2, 3, 4}
    assert [name for name, n in Counter(named).items() if n > 1] == []
    assert [name for name in named if not (TESTS.parent / name).is_file()] == []


def test_no_two_test_files_have_one_name() -> None:
    assert [name for name, n in Counter(file.name for file in FILES).items() if n > 1] == []


def asserts(function: ast.FunctionDef, helpers: frozenset[str] = frozenset()) -> bool:
    """Whether it asserts, expects an error or a skip, or calls a helper that does."""
    for node in ast.walk(function):
        match node:
            case ast.Assert() | ast.Raise():
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in helpers:
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="pytest"), attr=name)):
                if name in ("raises", "warns", "fail"):
                    return True
    return False


def functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """All of them, also those inside classes and other functions."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield statement
        yield from functions(getattr(statement, "body", []))


def test_every_test_asserts_something() -> None:
    every = [
        (file, function)
        for file in TESTS.rglob("*.py")
        for function in functions(ast.parse(file.read_text(encoding="utf-8")).body)
    ]
    helpers = frozenset(f.name for _, f in every if not f.name.startswith("test_") and asserts(f))
    files = set(FILES)
    tests = [(file, f) for file, f in every if file in files and f.name.startswith("test_")]
    assert len(tests) > 1000
    silent = [
        f"{file.relative_to(TESTS)}: {f.name}" for file, f in tests if not asserts(f, helpers)
    ]
    assert not silent, "\n".join(silent)
