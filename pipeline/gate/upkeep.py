"""Looking after what gates leave in the store: how much it is, and what of it nobody uses.

gate/environments/   interpreters with torch and Triton, unpacked: gigabytes
gate/engines/        engines' own files, as published and patched
gate/answers/        workers' answers to cases
gate/kernels/        what single kernels need, by Triton and ptxas, for any version
gate/kernels-unlocked/  the same of engines that no lock names, each for itself
gate/kernels-of/     which kernels an engine's code has
gates/arch/          which machine code an object holds
"""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.files import os_errors_explained, remove_tree
from pipeline.store.store import Store, read_image_record
from pipeline.store.upkeep import StoreSection, stats_below, tree_sections

# A gate marks what it uses (`mark_used`). Anything here is made again from locks and wheels, so a
# month without use is enough to let go of environments of gigabytes.
_UNUSED_S = 30 * 24 * 3600
_PARTS = {
    "gate environments": "gate/environments",
    "gate engines": "gate/engines",
    "gate answers": "gate/answers",
    "gate kernels": "gate/kernels",
    "gate kernels of other versions": "gate/kernels-unlocked",
    "gate notes on engines": "gate/kernels-of",
    "gate notes on objects": "gates/arch",
}


def gate_sections(store: Store) -> list[StoreSection]:
    """How much of what gates left."""
    return tree_sections(store, _PARTS)


def gate_leftovers(store: Store) -> list[Path]:
    """Folders and files that no gate has used for a month, and notes on objects of no image."""
    old = time.time() - _UNUSED_S
    folders = [place for place in _PARTS.values() if place.startswith("gate/")]
    unused = [
        entry
        for folder in folders
        for entry in _entries(store.root / folder)
        if entry.lstat().st_mtime < old
    ]
    # reading an image's objects again takes minutes: it keeps its notes as long as it is kept
    objects = _objects(store)
    notes = [p for p in _entries(store.root / "gates" / "arch") if p.stem not in objects]
    return [*unused, *notes]


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder of the store; a link leads elsewhere and is not looked into."""
    is_own = folder.is_dir() and not folder.is_symlink()
    return sorted(folder.iterdir()) if is_own else []


def _objects(store: Store) -> set[str]:
    """Hashes of the files of every built image."""
    hashes: set[str] = set()
    for path in store.image_paths():
        for layer in read_image_record(path).layers:
            hashes |= {row.sha256 for row in store.contents(layer.record)}
    return hashes


def size_of(path: Path) -> int:
    """A file's size, or that of all files below a folder."""
    if path.is_dir() and not path.is_symlink():
        # a file that another tree links to stays on the disk
        return sum(s.st_size for s in stats_below(path) if s.st_nlink == 1)
    return path.lstat().st_size


def remove(paths: list[Path]) -> int:
    """Take leftovers away; returns the bytes freed."""
    freed = 0
    for path in paths:
        with os_errors_explained(path):
            freed += size_of(path)
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)
    return freed
