"""A folder as the model-signing format sees it: every file below it, and the SHA-256 of each."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from pipeline.weights.disk.hashing import Moved, cores, on_all_cores, read_open
from pipeline.weights.disk.proof import FileUnfit, FileUnreadable, open_below, open_pin
from pipeline.weights.disk.survey import walk
from pipeline.weights.model import FilePin
from pipeline.weights.place import STATE, Place

# What the format's own tool (model_signing) leaves out by default.
GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
# What our and the Hub's own tools keep beside the files; no engine loads it.
OWN_PATHS = (STATE, ".cache/huggingface")

Digests = dict[str, str | FileUnfit | FileUnreadable]  # or why a file has none


def locked_digests(place: Place, pins: Sequence[FilePin]) -> Digests:
    """The SHA-256 of locked files; only those that the lock knows by git's SHA-1 are read."""
    locked: Digests = {pin.path: pin.sha256 for pin in pins if pin.sha256}
    small = {pin.path: pin for pin in pins if not pin.sha256}
    return locked | read_digests(lambda path, stop: _digest(place, small[path], stop), list(small))


def _digest(place: Place, pin: FilePin, stop: threading.Event) -> str:
    handle = open_pin(place, pin)
    try:
        # once for either hash: files outside LFS are small
        proof = read_open(handle, pin.new_hash(), stop=stop)
        reading = read_open(handle, hashlib.sha256(), stop=stop)
    finally:
        os.close(handle)
    if proof.digest != pin.want or proof.identity != reading.identity:
        raise FileUnfit("does not have the locked bytes")
    return reading.digest


def read_digests(work: Callable[[str, threading.Event], str], paths: list[str]) -> Digests:
    """The digests that `work` reads, on all cores; Ctrl-C sets its event."""
    digests: Digests = {}
    stop = threading.Event()

    def note(path: str) -> None:
        try:
            digests[path] = work(path, stop)
        except (FileUnfit, FileUnreadable) as reason:
            digests[path] = reason
        except Moved as error:
            digests[path] = FileUnfit(str(error))
        except OSError as error:
            digests[path] = FileUnreadable(f"could not be read now ({error.strerror})")

    on_all_cores(note, paths, cores(), stop.set)
    return digests


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


def sha256_below(root: Path, path: str, stop: threading.Event | None = None) -> str:
    """The SHA-256 of a file that lies in a folder; a link may only lead into the same folder."""
    real = (root / path).resolve()
    if (root / path).is_symlink() and not real.is_relative_to(_home(root)):
        raise FileUnfit("is a link out of the folder")
    where, name = (real.parent, real.name) if (root / path).is_symlink() else (root, path)
    handle = open_below(where, name)
    try:
        return read_open(handle, hashlib.sha256(), stop=stop).digest
    finally:
        os.close(handle)


def _home(root: Path) -> Path:
    """What links may lead to: the folder, or of a Hub cache's snapshot the repository."""
    # a snapshot is all links: its blobs lie beside it in the same repository
    real = root.resolve()
    return real.parent.parent if real.parent.name == "snapshots" else real
