"""Which mutants of a package are tried."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.docs.packages import PARTS
from tests.mutants.changes import Mutant, mutants_of
from tests.mutants.trials import CannotTest

# These run a package by its commands, and so import nothing of it.
BY_COMMAND = {
    "evidence/verify": (
        "tests/unit/cli/test_layers_from_registry.py",
        "tests/unit/source/test_exported.py",
        "tests/unit/weights/check/test_backing.py",
    ),
}


def files_of(root: Path, package: str) -> list[str]:
    """The modules of a package: a folder of `pipeline/`, or one module of it."""
    place = (root / "pipeline" / package).resolve()
    module = place.with_suffix(".py")
    found = [module] if module.is_file() else sorted(place.rglob("*.py"))
    if not found or not place.is_relative_to(root.resolve() / "pipeline"):
        raise CannotTest(f"pipeline/ has no package or module named {package}")
    return [str(path.relative_to(root.resolve())) for path in found]


def tests_of(root: Path, package: str) -> list[str]:
    """The unit tests of a package, or of the one it stands in, and all that import or run it."""
    # tests/unit has a folder for each package, without the part that it belongs to
    part, _, below = package.partition("/")
    short = below if part in PARTS and below else package
    module = Path("tests/unit") / Path(short).parent / f"test_{Path(short).name}.py"
    places = (Path("tests/unit", short), module, *Path("tests/unit", short).parents)
    own = next((place for place in places if (root / place).exists()), None)
    if own is None:
        raise CannotTest(f"tests/unit has no tests of {package}")
    imported = re.compile(
        rf"^\s*(from|import) pipeline\.{package.replace('/', '.')}\b", re.MULTILINE
    )
    files = (path for path in (root / "tests" / "unit").rglob("test_*.py"))
    others = [p.relative_to(root) for p in files if imported.search(p.read_text("utf-8"))]
    others += [Path(name) for name in BY_COMMAND.get(package, ())]
    return [str(own), *sorted({str(p) for p in others if not p.is_relative_to(own)})]


def mutants_in(root: Path, files: Iterable[str]) -> list[Mutant]:
    """Every mutant of these files."""
    return [m for f in files for m in mutants_of(f, (root / f).read_text(encoding="utf-8"))]


def choose(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """A sample that a seed fixes; code that changes elsewhere leaves nearly all of it in place."""
    times: Counter[tuple[str, str, str, str]] = Counter()
    ranked = []
    for mutant in mutants:
        times[mutant.name] += 1
        text = repr((seed, mutant.name, times[mutant.name]))
        ranked.append((hashlib.sha256(text.encode()).digest(), mutant))
    chosen = [mutant for _, mutant in sorted(ranked, key=lambda pair: pair[0])[:size]]
    return sorted(chosen, key=lambda m: (m.file, m.line, m.after))
