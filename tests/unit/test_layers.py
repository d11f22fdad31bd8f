"""Three layers: packages that know one matter, `app` that combines them, `cli` that prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.packages import PACKAGE, arrows, statements


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_only_the_command_line_imports_click() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "cli" not in path.parents]
    users = [
        str(path.relative_to(PACKAGE))
        for path in files
        # a file that does not hold the word need not be parsed
        if "click" in path.read_text(encoding="utf-8")
        and any(name.partition(".")[0] == "click" for name in imported(path))
    ]
    assert users == []


def test_the_application_imports_nothing_of_the_command_line() -> None:
    assert "cli" not in arrows()["app"]


def test_only_the_command_line_imports_the_application() -> None:
    assert [package for package, others in arrows().items() if "app" in others] == ["cli"]


def test_the_application_prints_nothing() -> None:
    printing = [
        f"{path.name}:{node.lineno}"
        for path in (PACKAGE / "app").glob("*.py")
        if "print" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert printing == []
