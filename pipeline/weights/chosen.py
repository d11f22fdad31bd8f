"""Which files of a set are meant by patterns."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pipeline.errors import WeightsUnknown
from pipeline.weights.model import FilePin, WeightsLock


def is_chosen(path: str, only: Sequence[str]) -> bool:
    """Whether a pattern asks for it, or there is none."""
    return not only or any(fnmatchcase(path, pattern) for pattern in only)


def chosen_files(lock: WeightsLock, only: Sequence[str]) -> list[FilePin]:
    """The files that are asked for. None at all is a mistake in the pattern, not a success."""
    pins = [pin for pin in lock.files if is_chosen(pin.path, only)]
    if not pins:
        raise WeightsUnknown(
            f"{lock.name}: no file matches {' or '.join(only)}",
            "Patterns are those of a shell, on the whole path: `*` also crosses folders.",
        )
    return pins
