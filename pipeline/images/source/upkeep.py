"""What compiling leaves in the store: how much it is, and what no build needs any more.

toolchains/   toolchain images, unpacked: a gigabyte each, made again from the image
objects/      compiled objects, by what they were compiled from; ccache keeps them below 30 GB
trees/        how each compiled tree was made; its layer is with the others
logs/         the output of the last build of each kind
"""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.artifacts.oci.record import LayerRecord
from pipeline.artifacts.store.store import Store, read_own
from pipeline.artifacts.store.upkeep import StoreSection, tree_sections
from pipeline.core.errors import StoreDamaged
from pipeline.core.files import files_below

# Builds make all of it again from locks: after a month without use the gigabytes may go.
_UNUSED_S = 30 * 24 * 3600
_PARTS = {
    "unpacked toolchains": "toolchains",
    "compiled objects": "objects",
    "notes on compiled trees": "trees",
    "logs of builds": "logs",
}


def source_sections(store: Store) -> list[StoreSection]:
    """Counts what compiling wrote to the store."""
    return tree_sections(store, _PARTS)


def source_leftovers(store: Store) -> list[Path]:
    """Lists toolchains, objects and logs without use for a month, and notes on removed trees.

    ccache renews the time of an entry that it uses; unpacking renews that of a toolchain.
    """
    old = time.time() - _UNUSED_S
    folders = [_entries(store.root / place) for place in ("toolchains", "logs")]
    unused = [path for entries in folders for path in entries if path.lstat().st_mtime < old]
    objects = [
        Path(entry.path)
        for top in _entries(store.root / "objects")
        for entry in files_below(top)
        if entry.stat(follow_symlinks=False).st_mtime < old
    ]
    trees = []
    for note in _entries(store.root / "trees"):
        try:
            # a tree's signed statement is next to its record
            data = read_own(store.root / "layers" / f"{note.name.partition('.')[0]}.json")
            record = LayerRecord.model_validate_json(data)
            if not store.blob_path(record.digest).exists():
                trees.append(note)
        except (FileNotFoundError, StoreDamaged, ValueError):
            trees.append(note)
    # earlier versions could import objects, and noted which
    return [*unused, *objects, *trees, *_entries(store.root / "imports")]


def _entries(folder: Path) -> list[Path]:
    """Lists a folder of the store; a link leads elsewhere and is not followed."""
    is_own = folder.is_dir() and not folder.is_symlink()
    return sorted(folder.iterdir()) if is_own else []
