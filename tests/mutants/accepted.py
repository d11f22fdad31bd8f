"""Mutants that may survive, each with its reason (`accepted.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.core.model import Frozen
from tests.mutants.changes import Mutant, name_of
from tests.mutants.trials import CannotTest

FILE = Path(__file__).with_name("accepted.toml")


class Accepted(Frozen):
    """A change that no test needs to find; known by its text, wherever the lines move."""

    file: str
    function: str
    before: str
    after: str
    reason: str

    @property
    def name(self) -> tuple[str, str, str, str]:
        """As a mutant is known."""
        return name_of(self.file, self.function, self.before, self.after)


def read_accepted(path: Path = FILE) -> list[Accepted]:
    """The list, in its order."""
    if not path.exists():
        return []
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("accepted", [])
        return [Accepted.model_validate(entry) for entry in entries]
    except ValueError as error:
        raise CannotTest(f"{path}: {error}") from error


def stale(
    accepted: Sequence[Accepted], mutants: Iterable[Mutant], files: Iterable[str]
) -> list[Accepted]:
    """Entries about these files that no mutant answers to any more."""
    known, looked_at = {m.name for m in mutants}, set(files)
    return [a for a in accepted if a.file in looked_at and a.name not in known]
