"""Locked files gathered in a folder, for a machine that reaches nothing."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from pipeline import log
from pipeline.errors import StoreUnwritable
from pipeline.fetch.inputs import Fetcher
from pipeline.files import link_or_copy, os_errors_explained, sha256_of_file
from pipeline.lock.base import BasePin
from pipeline.lock.model import Pin
from pipeline.store.store import Store


def collect(store: Store, fetcher: Fetcher, pins: list[Pin], folder: Path) -> int:
    """Fetch all pins and put them into `folder` under their own names; returns the bytes."""
    with os_errors_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    todo = [p for p in pins if not _is_there(folder / p.file, p)]
    total = sum(p.size_bytes for p in todo)
    title = f"Collecting {len(todo)} files, {log.size(total)}"
    with (
        log.step(title),
        log.progress("fetched", total) as bar,
        closing(fetcher.fetch_all(todo, bar)) as arrivals,
    ):
        for pin, path in arrivals:
            with os_errors_explained(folder):
                _place(path, folder / pin.file)
    return sum(p.size_bytes for p in pins)


def collect_base(store: Store, fetcher: Fetcher, pin: BasePin, folder: Path) -> list[int]:
    """The documents and layers of a foreign base by their hashes; returns the bytes of each."""
    fetcher.bases.bring(pin)
    place = folder / "sha256"
    sizes = {x.digest: x.size_bytes for x in (*pin.documents, *pin.blobs)}
    with os_errors_explained(folder):
        place.mkdir(parents=True, exist_ok=True)
        for digest in sizes:
            _place(store.blob_path(digest), place / digest.removeprefix("sha256:"))
    return list(sizes.values())


def _is_there(path: Path, pin: Pin) -> bool:
    is_there = path.is_file() and path.stat().st_size == pin.size_bytes
    return is_there and sha256_of_file(path) == f"sha256:{pin.sha256}"


def _place(source: Path, target: Path) -> None:
    """A link where the disk allows it; else a copy that gets its name only when whole."""
    if target.is_dir():
        raise StoreUnwritable(f"{target}: is a folder", "Move it, or name another folder.")
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    link_or_copy(source, partial)
    os.replace(partial, target)
