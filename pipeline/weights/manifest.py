"""A folder as the model-signing format sees it: every file below it, and the SHA-256 of each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pipeline import log
from pipeline.errors import WeightsDamaged
from pipeline.weights.hashing import Identity
from pipeline.weights.model import FilePin
from pipeline.weights.place import STATE, Place
from pipeline.weights.proof import (
    Unfit,
    check_open,
    hash_open,
    identity,
    open_below,
    open_pin,
)

# What the format's own tool leaves out unless told otherwise.
GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
# What our and the Hub's own tools keep beside the files; no engine loads it.
OWN_PATHS = (STATE, ".cache/huggingface")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Proved:
    """The files of a set by path: their SHA-256, what is wrong, and how it is known."""

    digests: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    files_read: int = 0
    by_receipt: int = 0

    def or_damaged(self, name: str) -> dict[str, str]:
        """The digests, if every file is right."""
        if self.wrong:
            first = "; ".join(f"{p}: {why}" for p, why in sorted(self.wrong.items())[:3])
            raise WeightsDamaged(f"{name}: {len(self.wrong)} files are not right: {first}")
        return self.digests


def prove(place: Place, vouched: Mapping[str, Identity], *, full: bool = False) -> Proved:
    """Every file of a set; with a locked SHA-256 and a receipt it need not be read."""
    known = {} if full else vouched
    total = sum(p.size_bytes for p in place.lock.files if p.path not in known)
    with log.progress("read", total) as bar:

        def one(pin: FilePin) -> tuple[str, bool]:
            return _prove_one(place, pin, known.get(pin.path), bar.advance)

        return _sorted_out(place.lock.files, on_cores(one, place.lock.files))


def _sorted_out(pins: list[FilePin], results: list[tuple[str, bool] | Unfit]) -> Proved:
    done = Proved()
    for pin, result in zip(pins, results, strict=True):
        if isinstance(result, Unfit):
            done.wrong[pin.path] = str(result)
            continue
        done.digests[pin.path], was_read = result
        done.files_read += was_read
        done.by_receipt += not was_read
    return done


def _prove_one(
    place: Place, pin: FilePin, known: Identity | None, tell: Callable[[int], None]
) -> tuple[str, bool]:
    if place.hub_cache and _link(place.name(pin)) != place.link_target(pin):
        raise Unfit("its name does not lead to its blob")
    handle = open_pin(place, pin)
    try:
        if pin.sha256 and known is not None and identity(handle) == known:
            return pin.sha256, False
        return check_open(handle, pin, tell)[1], True
    finally:
        os.close(handle)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def on_cores(work: Callable[[Item], Result], items: list[Item]) -> list[Result | Unfit]:
    """Do the work on all cores; what is unfit comes back as the reason why."""

    def caught(item: Item) -> Result | Unfit:
        try:
            return work(item)
        except Unfit as reason:
            return reason
        except OSError as error:
            return Unfit(f"cannot be read ({error.strerror})")

    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        return list(pool.map(caught, items))
    finally:
        pool.shutdown(cancel_futures=True)


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of some paths, or lies in one of them."""
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def files_below(root: Path, ignored: Iterable[str]) -> list[str]:
    """Every file below a folder but the ignored ones; links are named and not entered."""
    left_out = list(ignored)
    return sorted(_walk(root, "", left_out), key=PurePosixPath)


def _walk(root: Path, below: str, ignored: list[str]) -> Iterator[str]:
    with os.scandir(root / below) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        path = f"{below}{entry.name}"
        if is_below(path, ignored):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, f"{path}/", ignored)
        else:
            yield path


def sha256_below(root: Path, path: str) -> str:
    """The SHA-256 of a file that lies in a folder; a link may only lead into the same folder."""
    real = (root / path).resolve()
    if (root / path).is_symlink() and not real.is_relative_to(_home(root)):
        raise Unfit("is a link out of the folder")
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
    real = root.resolve()
    return real.parent.parent if real.parent.name == "snapshots" else real
