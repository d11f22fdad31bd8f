"""The lock of a source: its archive by hash, and its files by one digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.core.errors import LockEdited, LockStale
from pipeline.core.files import write_bytes
from pipeline.core.model import Digest, Name
from pipeline.core.sealed import UNSEALED, Sealed, read_sealed
from pipeline.images.lock.model import ArchivePin
from pipeline.images.spec.source import SourceSpec

_HINT = "`sm120 source lock NAME` renews it; with --dry-run it shows what would change."


class SourceLock(Sealed):
    """Which files a source consists of."""

    format: Literal[1] = 1
    source: Name
    spec: Digest
    archive: ArchivePin
    tree: Digest  # of all files, whatever archive they came in
    files: Annotated[int, Field(gt=0)]
    seal: Digest


def sealed_source(source: str, spec: str, archive: ArchivePin, tree: str, files: int) -> SourceLock:
    """A new lock with its seal."""
    draft = SourceLock(
        source=source, spec=spec, archive=archive, tree=tree, files=files, seal=UNSEALED
    )
    return draft.sealed()


def write_source_lock(path: Path, lock: SourceLock) -> None:
    """Put the lock in its place, whole."""
    lines = [
        "# Written by `sm120 source lock`; do not edit: the seal would not match, and builds stop.",
        f"format: {lock.format}",
        f"source: {lock.source}",
        f"spec: {lock.spec}",
        f"archive: {json.dumps(lock.archive.model_dump(exclude_none=True))}",
        f"tree: {lock.tree}",
        f"files: {lock.files}",
        f"seal: {lock.seal}",
        "",
    ]
    write_bytes(path, "\n".join(lines).encode())


def read_source_lock(path: Path) -> SourceLock:
    """A lock that is whole and unedited."""
    return read_sealed(path, SourceLock, missing="Make it with `sm120 source lock NAME`.")


def current_source_lock(path: Path, spec: SourceSpec) -> SourceLock:
    """The lock of a source, proved to answer today's spec."""
    lock = read_source_lock(path)
    if lock.source != spec.name:
        raise LockEdited(f"{path.name}: is the lock of {lock.source}", _HINT)
    if lock.spec != spec.lock_digest():
        raise LockStale(f"{path.name}: the spec has changed since it was locked", _HINT)
    return lock
