"""Removing a whole store: its own folders and files, and nothing that others put there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from pipeline.artifacts.store.store import MARK, OWN, Store, is_store
from pipeline.artifacts.store.upkeep import OWN_NAME, stats_below
from pipeline.core.errors import StoreUnwritable
from pipeline.core.files import os_errors_explained, remove_tree

# Beside the folders; see pipeline/app/signing.py for the second.
_FILES = (MARK, "key-offered")
# Folders of files that are named by hashes: a file of any other name is foreign.
_OWN = re.compile(rf"{OWN_NAME.pattern}|\.new-\w+")  # a kill leaves the second
_HASHED = ("oci/blobs/sha256", "inputs", "partial", "layers", "contents")


def own_parts(root: Path) -> list[Path]:
    """What a store made in its folder; nothing where the folder is no store."""
    if not is_store(root):
        return []
    folders = [root / name for name in OWN if "/" not in name]
    return [p for p in (*folders, *(root / f for f in _FILES)) if p.exists()]


def total_bytes(root: Path) -> int:
    """How much of a disk the whole store takes; hard links count once."""
    sizes = {(s.st_dev, s.st_ino): s.st_size for p in own_parts(root) for s in stats_below(p)}
    return sum(sizes.values())


def remove_store(store: Store) -> list[Path]:
    """Removes a store once no process uses it; returns foreign files, which stay."""
    with store.alone():
        folders = [store.root / name for name in _HASHED]
        plain = [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]
        # what others put into a folder of files that are named by hashes
        listed = [p for folder in plain for p in sorted(folder.iterdir())]
        foreign = [p for p in listed if not _OWN.fullmatch(p.name)]
        around = {parent for path in foreign for parent in path.parents}
        # the lock and the mark last: until then it is a store, and can be removed again
        for path in sorted(own_parts(store.root), key=lambda p: p.name in ("locks", MARK)):
            for part in _own_below(path, foreign) if path in around else [path]:
                if part.is_symlink() or not part.is_dir():
                    with os_errors_explained(part):
                        part.unlink(missing_ok=True)
                    continue
                remove_tree(part)
                if part.exists():
                    raise StoreUnwritable(f"{part}: could not be removed", "Whose files are in it?")
    remaining = [p for p in sorted(store.root.iterdir()) if p not in around] + foreign
    if not remaining:
        with os_errors_explained(store.root):
            store.root.rmdir()
    return remaining


def _own_below(folder: Path, foreign: Collection[Path]) -> Iterator[Path]:
    """Everything in a folder but what is foreign, and the folders around that."""
    for path in sorted(folder.iterdir()):
        if any(path in other.parents for other in foreign):
            yield from _own_below(path, foreign)
        elif path not in foreign:
            yield path
