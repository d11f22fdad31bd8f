"""Looks after the store: lists what is in it, finds damage, and removes what can go."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.artifacts.store.store import Store, read_image_record, read_layer_table
from pipeline.core import files
from pipeline.core.errors import FolderInTheWay, StoreDamaged
from pipeline.core.model import Frozen

_STALE_S = 7 * 24 * 3600  # a younger download may belong to a fetch of today
# Builds and gates make again from locks what nobody used for a month: gigabytes may go.
UNUSED_S = 30 * 24 * 3600
# What a store puts into its folders is named by hashes; a file of any other name is not its own.
OWN_NAME = re.compile(r"[0-9a-f]{64}(\.foreign)?(\.json)?")


class StoreSection(Frozen):
    """One part of the store in numbers."""

    name: str
    files: int
    size_bytes: int


def sections(store: Store) -> list[StoreSection]:
    """Counts files and bytes of the store's parts."""
    folders = {"layers": "oci/blobs/sha256", "inputs": "inputs", "partial downloads": "partial"}
    folders["tables of contents"] = "contents"
    result = []
    for name, folder in folders.items():
        sizes = [_size(p) for p in _files(store.root / folder)]
        result.append(StoreSection(name=name, files=len(sizes), size_bytes=sum(sizes)))
    return result


def tree_sections(store: Store, places: Mapping[str, str]) -> list[StoreSection]:
    """The size of folders that other packages keep in the store, by the parts' names."""
    result = []
    for name, place in places.items():
        # trees share files by hard links: each counts once
        sizes = {(s.st_dev, s.st_ino): s.st_size for s in stats_below(store.root / place)}
        result.append(StoreSection(name=name, files=len(sizes), size_bytes=sum(sizes.values())))
    return result


def stats_below(path: Path) -> Iterator[os.stat_result]:
    """Stats every file below; skips one that a build just removed."""
    for entry in files.files_below(path):
        with suppress(FileNotFoundError):
            yield entry.stat(follow_symlinks=False)


def _files(folder: Path) -> Iterator[Path]:
    """The store's own files of a folder; others that users put there stay."""
    paths = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    return (p for p in paths if OWN_NAME.fullmatch(p.name))


def _size(path: Path) -> int:
    """A file's size; a build at the same time may have moved it on."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def damaged(store: Store, advance: Callable[[int], None]) -> list[Path]:
    """Files whose bytes do not match their name, read on all cores, and broken records."""
    named = [*_files(store.root / "oci" / "blobs" / "sha256"), *_files(store.root / "inputs")]

    def check(path: Path) -> bool:
        try:
            # a pipe would be waited for
            if not stat.S_ISREG(path.lstat().st_mode):
                return False
            got = files.sha256_of_file(path)
        except FileNotFoundError:
            # a build or a trim removed it meanwhile: gone is not damaged
            return True
        advance(_size(path))
        return got == f"sha256:{path.name}"

    whole = files.on_all_cores(check, named)
    bad = [path for path, is_whole in zip(named, whole, strict=True) if not is_whole]
    tables = [p for p in _files(store.root / "contents") if not _reads(read_layer_table, p)]
    records = [p for p in store.image_paths() if not _reads(read_image_record, p)]
    return [*bad, *tables, *records]


def _reads(read: Callable[[Path], object], path: Path) -> bool:
    try:
        read(path)
    except (StoreDamaged, FileNotFoundError):
        return not path.exists()
    return True


def total_bytes(store: Store) -> int:
    """What a full check reads."""
    return sum(s.size_bytes for s in sections(store) if s.name in ("layers", "inputs"))


def remove_files(paths: Iterable[Path]) -> int:
    """Removes damaged or unneeded files, which a build makes again; returns the bytes freed."""
    freed = 0
    for path in paths:
        # a folder in the place of a file is not the store's to remove
        if path.is_dir() and not path.is_symlink():
            raise FolderInTheWay(path)
        n_bytes = _size(path)
        with files.os_errors_explained(path):
            path.unlink(missing_ok=True)
        freed += n_bytes
    return freed


def unreachable(store: Store) -> list[Path]:
    """Blobs, tables and inputs that no kept image needs, and abandoned downloads."""
    # a record that cannot be read ends it: nothing can go while its blobs are unknown
    needed = [read_image_record(path).digests for path in store.image_paths()]
    names = {digest.removeprefix("sha256:") for digests in needed for digest in digests}
    blobs = [p for p in _files(store.root / "oci" / "blobs" / "sha256") if p.name not in names]
    tables = [p for p in _files(store.root / "contents") if p.name.split(".")[0] not in names]
    old = time.time() - _STALE_S
    partial = [p for p in _files(store.root / "partial") if p.lstat().st_mtime < old]
    # all inputs: they are in the layers already, and a rebuild can fetch them again
    return [*blobs, *tables, *_files(store.root / "inputs"), *partial]


def entries_of(folder: Path) -> list[Path]:
    """Lists a folder of the store; a link leads elsewhere and is not followed."""
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def bytes_below(path: Path) -> int:
    """A file's size, or that of all files below a folder."""
    if path.is_dir() and not path.is_symlink():
        # a file that another tree links to stays on the disk
        return sum(s.st_size for s in stats_below(path) if s.st_nlink == 1)
    return path.lstat().st_size


def remove_trees(paths: list[Path]) -> int:
    """Removes leftovers; returns the bytes freed."""
    freed = 0
    for path in paths:
        with files.os_errors_explained(path):
            freed += bytes_below(path)
            if path.is_dir() and not path.is_symlink():
                files.remove_tree(path)
            else:
                path.unlink(missing_ok=True)
    return freed
