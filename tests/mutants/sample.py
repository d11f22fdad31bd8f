"""Which mutants of a package are tried."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.docs.packages import PARTS
from tests.mutants.changes import Mutant, mutants_of
from tests.mutants.trials import CannotTest


def files_of(root: Path, room: str) -> list[str]:
    """The modules of a package: a folder of `pipeline/`, or one module of it."""
    place = (root / "pipeline" / room).resolve()
    module = place.with_suffix(".py")
    found = [module] if module.is_file() else sorted(place.rglob("*.py"))
    if not found or not place.is_relative_to(root.resolve() / "pipeline"):
        raise CannotTest(f"pipeline/ has no package or module named {room}")
    return [str(path.relative_to(root.resolve())) for path in found]


def tests_of(root: Path, room: str) -> str:
    """The unit tests of a package, or those of the package it stands in."""
    # tests/unit has a folder for each package, without the part that it belongs to
    part, _, below = room.partition("/")
    room = below if part in PARTS and below else room
    module = Path("tests/unit") / Path(room).parent / f"test_{Path(room).name}.py"
    for place in (Path("tests/unit", room), module, *Path("tests/unit", room).parents):
        if (root / place).exists():
            return str(place)
    raise CannotTest(f"tests/unit has no tests of {room}")


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
