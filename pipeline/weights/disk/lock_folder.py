"""A lock of one's own weights: every file of a local folder with its hash, and the receipt."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from pathlib import Path

from pydantic import ValidationError

from pipeline.core import log
from pipeline.core.errors import WeightsUnknown
from pipeline.core.files import os_errors_explained
from pipeline.core.model import canonical_json
from pipeline.weights.disk import receipt
from pipeline.weights.disk.hashing import on_all_cores, read_file
from pipeline.weights.model import FilePin, WeightsLock, sealed, spec_of
from pipeline.weights.place import STATE, Place, in_hub_cache, require_no_links

# The organisation of such a lock: no repository of the Hub has it.
LOCAL = "local"
# What clients of the Hub and git keep beside the files.
_NOT_WEIGHTS = (STATE, ".cache", ".git")


def is_own(lock: WeightsLock) -> bool:
    """Whether a lock is of a folder rather than of a repository."""
    return lock.repository.startswith(f"{LOCAL}/")


def lock_folder(folder: Path) -> WeightsLock:
    """Hash every file of a folder, and leave the lock and a receipt in it.

    The commit is that of the content: the same files give the same lock.
    """
    folder = folder.resolve()
    if in_hub_cache(folder):
        raise WeightsUnknown(
            f"{folder}: is a part of a Hub cache, whose files have a repository",
            "Lock that repository: `sm120 weights lock ORG/MODEL@COMMIT`.",
        )
    require_no_links(folder / STATE)
    stop = threading.Event()
    with os_errors_explained(folder):
        paths = _files(folder)
        since_ns = receipt.state_time_ns(folder / STATE)  # before the first file is read
        sizes = {path: (folder / path).stat().st_size for path in paths}
        total, order = sum(sizes.values()), sorted(paths, key=lambda path: -sizes[path])
        what = f"Hashing {log.count(len(paths), 'file')}, {log.size(total)}"
        with log.step(what), log.progress("hashed", total) as bar:
            read = on_all_cores(
                lambda path: read_file(
                    folder / path, hashlib.sha256(), advance=bar.advance, stop=stop
                ),
                order,
                stop.set,
            )
    readings = dict(zip(order, read, strict=True))
    pins = [
        FilePin(path=path, size_bytes=reading.identity.size_bytes, sha256=reading.digest)
        for path, reading in readings.items()
    ]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.name).strip(".-") or "weights"
    content = canonical_json([pin.model_dump() for pin in sorted(pins, key=lambda p: p.path)])
    commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    lock = sealed(spec_of(f"{LOCAL}/{name[:90]}"), commit, pins)
    place = Place(folder, lock)
    with os_errors_explained(folder):
        place.keep_lock()
    if since_ns is not None:
        entries = [receipt.proved(pin, readings[pin.path], since_ns) for pin in lock.files]
        receipt.keep(place, entries, ())
    return lock


def _files(folder: Path) -> list[str]:
    """The files of a folder; a link is refused, as its bytes are somewhere else."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_WEIGHTS)
        for name in (*folders, *names):
            path = Path(root, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise WeightsUnknown(
                    f"{path}: is not a plain file",
                    "A lock is of files alone: copy what the link leads to into the folder.",
                )
        found += [Path(root, name).relative_to(folder).as_posix() for name in sorted(names)]
    if not found:
        raise WeightsUnknown(f"{folder}: has no files", "Name the folder of the weights.")
    for name in found:
        try:
            FilePin(path=name, size_bytes=0, sha256="0" * 64)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise WeightsUnknown(f"{folder / name}: {reason}", "Rename the file.") from error
    return found
