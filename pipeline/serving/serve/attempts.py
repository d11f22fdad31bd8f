"""Every serve and every failure: a line when it begins and a line when it ends.

Lines are only ever added. An attempt whose end was never written was killed, or still goes on. A
line that a full disk or a power cut left half-written is skipped.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, StringConstraints

from pipeline.core import foreign_json
from pipeline.core.files import locked, os_errors_explained
from pipeline.core.model import Digest, Frozen, Name, Stamp, canonical_json
from pipeline.serving.recipe.launch import Overrides
from pipeline.serving.serve.host_nccl import HostNccl

AttemptId = Annotated[str, StringConstraints(pattern=r"^[0-9]{8}T[0-9]{6}-[0-9a-f]{6}$")]
Kind: TypeAlias = Literal["serve", "smoke"]
Outcome: TypeAlias = Literal["serving", "stopped", "passed", "failed", "interrupted"]
# An entry has some hundred bytes; options may hold long paths and a failure.
_MOST_LINE_BYTES = 64 << 10
# Twenty years of ten attempts a day; a file beyond it is read from its end.
_MOST_BYTES = 64 << 20
_MOST_FAILURE = 2000
# Weights of 600 GB take a quarter of an hour, and kernels may be compiled at the first start.
START_S = 3600.0


class ServeOptions(Frozen):
    """What a user chose for one start, stored so that the same can be started again."""

    overrides: Overrides = Overrides()
    weights: str | None = None  # whole paths: the same may be started from another folder
    draft: str | None = None
    cards: tuple[int, ...] = ()
    lan: bool = False
    host_nccl: HostNccl | None = None
    timeout_s: float = START_S
    skipped: tuple[str, ...] = ()

    def drafting(self, wanted: bool) -> ServeOptions:
        """The same options with speculation turned on or off."""
        overrides = self.overrides.model_copy(update={"enable_eagle3": wanted})
        return self.model_copy(update={"overrides": overrides})


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
    # one line, short enough to be stored
    failure: Annotated[str, AfterValidator(lambda text: " ".join(text.split())[:_MOST_FAILURE])] = (
        ""
    )
    issues: list[Name] = []  # known ones that were recognised in its log
    kernels: list[str] = []  # that its log names, of an engine that serves
    seconds: Annotated[float, Field(ge=0)]
    at: Stamp


class _Line(Frozen):
    entry: Annotated[Begun | Ended, Discriminator("event")]


@dataclass(frozen=True)
class Attempt:
    """One attempt as it is known now."""

    begun: Begun
    ends: tuple[Ended, ...] = ()

    @property
    def outcome(self) -> str:
        """The last known outcome."""
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
        """The file of all that an engine printed during its start."""
        return self.folder / f"{attempt}.log"

    def add(self, entry: Begun | Ended) -> None:
        """Adds one line, which is on the disk when this returns."""
        line = canonical_json(_Line(entry=entry).model_dump(mode="json")) + b"\n"
        with locked(self.folder / "lock"), os_errors_explained(self.path):
            # one write of a whole line in append mode: readers need no lock
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(handle).st_size
                # a line that was cut short must not take the next one with it
                is_whole = size == 0 or os.pread(handle, 1, size - 1) == b"\n"
                os.write(handle, line if is_whole else b"\n" + line)
                # the entry must survive what a start may do to a machine
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
        attempts: dict[str, Attempt] = {}
        damaged = 0
        # cut at the start: the first line is half a one
        for line in filter(None, lines[1:] if size > _MOST_BYTES else lines):
            try:
                value = foreign_json.read_json(line, most_bytes=_MOST_LINE_BYTES)
                entry = _Line.model_validate(value).entry
            except ValueError:
                damaged += 1
                continue
            # an end without a beginning stands in the part that was cut off
            if isinstance(entry, Begun):
                attempts.setdefault(entry.id, Attempt(entry))
            elif (known := attempts.get(entry.id)) is not None:
                attempts[entry.id] = Attempt(known.begun, (*known.ends, entry))
        return Timeline(list(attempts.values()), damaged)


def new_id(now: datetime | None = None) -> str:
    """An id that sorts by time; two at the same second differ."""
    return f"{now or datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
