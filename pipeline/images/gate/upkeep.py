"""What gates write to the store: how much it is, and what no gate uses any more.

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

from pipeline.artifacts.store.store import Store, read_image_record
from pipeline.artifacts.store.upkeep import stats_below
from pipeline.core.files import os_errors_explained, remove_tree

# A gate marks what it uses (`mark_used`), and makes anything again from locks and wheels: after a
# month without use environments of gigabytes may go.
_UNUSED_S = 30 * 24 * 3600
GATE_PARTS = {
    "gate environments": "gate/environments",
    "gate engines": "gate/engines",
    "gate answers": "gate/answers",
    "gate kernels": "gate/kernels",
    "gate kernels of other versions": "gate/kernels-unlocked",
    "gate notes on engines": "gate/kernels-of",
    "gate notes on objects": "gates/arch",
}


def gate_leftovers(store: Store) -> list[Path]:
    """Lists what no gate has used for a month, and notes on objects of no built image."""
    old = time.time() - _UNUSED_S
    folders = [store.root / place for place in GATE_PARTS.values() if place.startswith("gate/")]
    unused = [x for folder in folders for x in _entries(folder) if x.lstat().st_mtime < old]
    # reading an image's objects again takes minutes: their notes stay as long as the image
    hashes: set[str] = set()
    for path in store.image_paths():
        for layer in read_image_record(path).layers:
            hashes |= {row.sha256 for row in store.contents(layer.record)}
    notes = [p for p in _entries(store.root / "gates" / "arch") if p.stem not in hashes]
    return [*unused, *notes]


def _entries(folder: Path) -> list[Path]:
    """Lists a folder of the store; a link leads elsewhere and is not followed."""
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def bytes_below(path: Path) -> int:
    """A file's size, or that of all files below a folder."""
    if path.is_dir() and not path.is_symlink():
        # a file that another tree links to stays on the disk
        return sum(s.st_size for s in stats_below(path) if s.st_nlink == 1)
    return path.lstat().st_size


def remove(paths: list[Path]) -> int:
    """Removes leftovers; returns the bytes freed."""
    freed = 0
    for path in paths:
        with os_errors_explained(path):
            freed += bytes_below(path)
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)
    return freed
