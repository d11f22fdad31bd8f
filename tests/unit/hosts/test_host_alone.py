"""What runs on hosts without us imports nothing of ours."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from pipeline.hosts.facts import capture
from pipeline.hosts.fleet import shell
from pipeline.hosts.probes.runner import WORKER

ROOT = Path(__file__).resolve().parents[3]
ALONE = [Path(capture.__file__), Path(shell.__file__), *sorted(WORKER.glob("*.py"))]


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports; a file's own package counts as none."""
    result = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            result |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            result.add(str(node.module).partition(".")[0])
    return result


@pytest.mark.parametrize("path", ALONE, ids=lambda p: p.name)
def test_only_the_standard_library_and_torch_are_imported(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | ({"torch"} if path.parent == WORKER else set())
    assert imported(path) - allowed == set()


def test_the_look_at_imports_would_see_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from pipeline.core.errors import X\n    import pydantic\n")
    assert imported(path) == {"pipeline", "pydantic"}


def test_the_play_reads_a_host_with_the_very_same_code() -> None:
    link = ROOT / "ansible" / "files" / "capture.py"
    assert link.resolve() == Path(capture.__file__).resolve()
    task = (ROOT / "ansible" / "tasks" / "record.yml").read_text("utf-8")
    assert "lookup('ansible.builtin.file', 'capture.py')" in task
