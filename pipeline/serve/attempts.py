"""Every serve and every failure, kept: a line when it begins and a line when it ends.

Lines are only ever added. An attempt whose end was never written was killed, or still goes on. A
line that a full disk or a power cut left half-written is passed over, and those after it are read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, StringConstraints, TypeAdapter, ValidationError

from pipeline import foreign_json
from pipeline.files import locked, os_errors_explained
from pipeline.model import Digest, Frozen, Name, Stamp, canonical_json
from pipeline.serve.options import ServeOptions

AttemptId = Annotated[str, StringConstraints(pattern=r"^[0-9]{8}T[0-9]{6}-[0-9a-f]{6}$")]
Kind: TypeAlias = Literal["serve", "smoke"]
Outcome: TypeAlias = Literal["serving", "stopped", "passed", "failed", "interrupted"]
_MOST_LINE_BYTES = 64 << 10
# Twenty years of ten attempts a day; a file beyond it is read from its end.
_MOST_BYTES = 64 << 20
_MOST_FAILURE = 2000


class Begun(Frozen):
    """What is tried, from which bytes."""

    event: Literal["begun"] = "begun"
    id: AttemptId
    kind: Kind
    recipe: Name
    recipe_digest: Digest
    image: Name | None = None
    image_digest: Digest | None = None
    weights_digest: Digest | None = None
    # the attempt that this one follows: as its fallback, or without the draft model that failed
    after: AttemptId | None = None
    options: ServeOptions | None = None
    host: str | None = None  # none: on this machine
    at: Stamp


class Ended(Frozen):
    """How it went."""

    event: Literal["ended"] = "ended"
    id: AttemptId
    outcome: Outcome
    failure: str = ""
    issues: list[Name] = []  # known ones that were recognised in its log
    seconds: Annotated[float, Field(ge=0)]
    at: Stamp


class _Line(Frozen):
    entry: Annotated[Begun | Ended, Discriminator("event")]


_LINE: TypeAdapter[_Line] = TypeAdapter(_Line)


@dataclass(frozen=True)
class Attempt:
    """One attempt as it is known now."""

    begun: Begun
    ends: tuple[Ended, ...] = ()

    @property
    def outcome(self) -> str:
        """The last thing that is known."""
        return self.ends[-1].outcome if self.ends else "unfinished"

    @property
    def failure(self) -> str:
        return next((end.failure for end in reversed(self.ends) if end.failure), "")

    @property
    def seconds(self) -> float | None:
        """How long the start took: a later stop does not make it longer."""
        return self.ends[0].seconds if self.ends else None


@dataclass(frozen=True)
class Timeline:
    """All attempts that can be read, and how many lines cannot."""

    attempts: list[Attempt]
    damaged: int


@dataclass(frozen=True)
class AttemptList:
    """The list of a store."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "attempts.jsonl"

    def log_path(self, attempt: str) -> Path:
        """All that an engine printed while it was waited for."""
        return self.folder / f"{attempt}.log"

    def add(self, entry: Begun | Ended) -> None:
        """One line more, on the disk before this returns."""
        line = canonical_json(_Line(entry=entry).model_dump(mode="json")) + b"\n"
        with locked(self.folder / "lock"), os_errors_explained(self.path):
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                # a line that was cut short must not take the next one with it
                os.write(handle, line if _ends_whole(handle) else b"\n" + line)
                os.fsync(handle)
            finally:
                os.close(handle)

    def read(self) -> Timeline:
        """The timeline, oldest first."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _MOST_BYTES))
                lines = file.read(_MOST_BYTES).split(b"\n")
        except FileNotFoundError:
            return Timeline([], 0)
        # cut at the start: the first line is half a one
        entries = [_entry(line) for line in (lines[1:] if size > _MOST_BYTES else lines) if line]
        good = [entry for entry in entries if entry is not None]
        return Timeline(_joined(good), len(entries) - len(good))


def _ends_whole(handle: int) -> bool:
    size = os.fstat(handle).st_size
    return size == 0 or os.pread(handle, 1, size - 1) == b"\n"


def _entry(line: bytes) -> Begun | Ended | None:
    try:
        value = foreign_json.read_json(line, most_bytes=_MOST_LINE_BYTES)
        return _LINE.validate_python(value).entry
    except (ValueError, ValidationError):
        return None


def _joined(entries: Iterable[Begun | Ended]) -> list[Attempt]:
    attempts: dict[str, Attempt] = {}
    for entry in entries:
        if isinstance(entry, Begun):
            attempts.setdefault(entry.id, Attempt(entry))
        elif (known := attempts.get(entry.id)) is not None:
            attempts[entry.id] = Attempt(known.begun, (*known.ends, entry))
    return list(attempts.values())


def new_id(now: datetime | None = None) -> str:
    """An id that sorts by time; two at the same second differ."""
    return f"{now or datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def stamp(now: datetime | None = None) -> str:
    """A time as files of ours write it."""
    return f"{now or datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def short_failure(text: str) -> str:
    """A failure in one line, short enough to be kept."""
    return " ".join(text.split())[:_MOST_FAILURE]
