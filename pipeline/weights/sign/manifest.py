"""A folder as the model-signing format sees it: every file below it, and the SHA-256 of each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pipeline.errors import WeightsDamaged
from pipeline.weights.disk.hashing import cores
from pipeline.weights.disk.proof import (
    FileUnfit,
    FileUnreadable,
    check_open,
    hash_open,
    open_below,
    open_pin,
)
from pipeline.weights.disk.survey import walk
from pipeline.weights.model import FilePin
from pipeline.weights.place import STATE, Place

# What the format's own tool (model_signing) leaves out by default.
GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
# What our and the Hub's own tools keep beside the files; no engine loads it.
OWN_PATHS = (STATE, ".cache/huggingface")

Item = TypeVar("Item")
Result = TypeVar("Result")


def locked_digests(place: Place) -> dict[str, str]:
    """The SHA-256 of every file of a verified set; only those git knows by SHA-1 are read."""
    digests = _digests(place, place.lock.files)
    for path, digest in digests.items():
        if not isinstance(digest, str):
            raise WeightsDamaged(f"{path}: {digest}")
    return {path: digest for path, digest in digests.items() if isinstance(digest, str)}


def files_digests(place: Place, pins: list[FilePin]) -> dict[str, str]:
    """The SHA-256 of locked files; a small file that is not as locked has none."""
    return {path: d for path, d in _digests(place, pins).items() if isinstance(d, str)}


def _digests(place: Place, pins: list[FilePin]) -> dict[str, str | FileUnfit | FileUnreadable]:
    """From the lock, where it has them; git's small files have a SHA-1 there and are read."""
    small = [pin for pin in pins if not pin.sha256]
    read = on_cores(lambda pin: _digest(place, pin), small)
    locked: dict[str, str | FileUnfit | FileUnreadable] = {
        p.path: p.sha256 for p in pins if p.sha256
    }
    return locked | {pin.path: digest for pin, digest in zip(small, read, strict=True)}


def _digest(place: Place, pin: FilePin) -> str:
    handle = open_pin(place, pin)
    try:
        return check_open(handle, pin)[1]
    finally:
        os.close(handle)


def on_cores(
    work: Callable[[Item], Result], items: list[Item]
) -> list[Result | FileUnfit | FileUnreadable]:
    """Do the work on all cores; a file that is unfit or unreadable gives the reason instead."""

    def caught(item: Item) -> Result | FileUnfit | FileUnreadable:
        try:
            return work(item)
        except (FileUnfit, FileUnreadable) as reason:
            return reason
        except OSError as error:
            return FileUnreadable(f"could not be read now ({error.strerror})")

    pool = ThreadPoolExecutor(cores())
    try:
        return list(pool.map(caught, items))
    finally:
        pool.shutdown(cancel_futures=True)


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of some paths, or lies in one of them."""
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def files_below(root: Path, ignored: Iterable[str]) -> list[str]:
    """Every file below a folder but the ignored ones; links are named and not followed.

    A folder that cannot be listed is named, with a slash: no signature can cover it.
    """
    skip = list(ignored)
    paths = (path for path in walk(root, skip) if not is_below(path, skip))
    return sorted(paths, key=PurePosixPath)


def sha256_below(root: Path, path: str) -> str:
    """The SHA-256 of a file that lies in a folder; a link may only lead into the same folder."""
    real = (root / path).resolve()
    if (root / path).is_symlink() and not real.is_relative_to(_home(root)):
        raise FileUnfit("is a link out of the folder")
    where, name = (real.parent, real.name) if (root / path).is_symlink() else (root, path)
    handle = open_below(where, name)
    try:
        sums = hashlib.sha256()
        hash_open(handle, [sums])
        return sums.hexdigest()
    finally:
        os.close(handle)


def _home(root: Path) -> Path:
    """What links may lead to: the folder, or of a Hub cache's snapshot the repository."""
    # a snapshot is all links: its blobs lie beside it in the same repository
    real = root.resolve()
    return real.parent.parent if real.parent.name == "snapshots" else real
