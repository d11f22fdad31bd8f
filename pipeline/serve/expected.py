"""What a recipe expects of the engine's log: no silent fallback to another backend."""

from __future__ import annotations

import re

from pipeline.errors import BackendDiffers, RecipeInvalid
from pipeline.recipe.model import Expectations, LogLine

_LONGEST = 4000


class ExpectedLog:
    """Sees every line of a start, and judges them once it is done."""

    def __init__(self, recipe: str, expect: Expectations) -> None:
        self._recipe = recipe
        self._missing = [(line, _compiled(recipe, line)) for line in expect.log]
        self._never = [(line, _compiled(recipe, line)) for line in expect.never]

    def see(self, line: str) -> None:
        """One line; one that must never be there ends the start."""
        short = line[:_LONGEST]
        self._missing = [each for each in self._missing if not each[1].search(short)]
        for wanted, pattern in self._never:
            if pattern.search(short):
                raise BackendDiffers(
                    f"{self._recipe}: the log must not have {wanted.pattern!r} ({wanted.why}),"
                    f" but says: {short.strip()[:300]}"
                )

    @property
    def missing(self) -> list[LogLine]:
        """What was not seen yet."""
        return [line for line, _ in self._missing]

    def require_all(self) -> None:
        """Refuse a start whose log lacks a line."""
        if self._missing:
            first = self._missing[0][0]
            raise BackendDiffers(
                f"{self._recipe}: nothing in the log matches {first.pattern!r} ({first.why})"
            )


def _compiled(recipe: str, line: LogLine) -> re.Pattern[str]:
    try:
        return re.compile(line.pattern)
    except re.error as error:
        raise RecipeInvalid(
            f"{recipe}: expect: {line.pattern!r} is no regular expression: {error}"
        ) from error
