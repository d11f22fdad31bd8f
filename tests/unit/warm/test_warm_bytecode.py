"""Python files compiled for an image: found by Python, the same twice, and never a stale one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.images.assemble.plan import BYTECODE

SOURCES = {
    "site/pkg/__init__.py": "NAMES = frozenset({'a', 'b', 'c'})\n",
    "site/pkg/part.py": "def answer():\n    return 'of the image'\n",
    "site/pkg/template.py": "class {{ name }}:\n",
    "site/pkg/nul.py": "x = '\0'\n",
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    for name, text in SOURCES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "part-0").write_text("\n".join(sorted(SOURCES)))
    return folder


def compiled(work: Path) -> dict[str, bytes]:
    env = {"PYTHONHASHSEED": "0"}
    subprocess.run(
        [sys.executable, "-S", str(BYTECODE), str(work), "part-0"], env=env, check=True, cwd=work
    )
    return {str(path.relative_to(work)): path.read_bytes() for path in work.rglob("*.pyc")}


def imported(work: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Imports as in the image: the prefix, and below it the whole path of each source."""
    env = {"PYTHONPYCACHEPREFIX": str(cache), "PYTHONPATH": str(work / "site")}
    program = "import pkg, pkg.part; print(pkg.part.answer())"
    return subprocess.run(
        [sys.executable, "-v", "-c", program], env=env, check=True, capture_output=True, text=True
    )


@pytest.fixture
def cache(work: Path, tmp_path: Path) -> Path:
    """What was compiled, where Python looks for it; read-only, as a layer below an image's user."""
    place, tag = tmp_path / "cache", f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    for name, data in compiled(work).items():
        to = place / str(work / name).removeprefix("/").replace(".pyc", f".{tag}.pyc")
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(data)
    return place


def test_what_is_no_python_is_left_out_and_the_rest_is_the_same_twice(work: Path) -> None:
    once = compiled(work)
    assert sorted(once) == ["site/pkg/__init__.pyc", "site/pkg/part.pyc"]
    assert compiled(work) == once


def test_python_takes_what_was_compiled(work: Path, cache: Path) -> None:
    before = {path: path.read_bytes() for path in cache.rglob("*.pyc")}
    ended = imported(work, cache)
    assert ended.stdout == "of the image\n"
    # its own words for a file that it took
    assert ended.stderr.count(f"matches {work}/site/pkg/") == 2, ended.stderr
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("text", ["return 'of the user'", "return 'of the uses '.strip()[:11]"])
def test_a_source_that_somebody_mounted_over_the_images_is_used(
    work: Path, cache: Path, text: str
) -> None:
    (work / "site/pkg/part.py").write_text(f"def answer():\n    {text}\n")
    ended = imported(work, cache)
    assert ended.stdout.startswith("of the use")
    assert ended.stderr.count(f"matches {work}/site/pkg/") == 1, ended.stderr
