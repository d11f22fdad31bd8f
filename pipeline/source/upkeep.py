"""Looking after what compiling leaves in the store: how much it is, and what of it nobody needs.

toolchains/   toolchain images, unpacked: a gigabyte each, made again from the image
objects/      compiled objects, by what they were compiled from; ccache keeps them below 30 GB
imports/      which of them came from elsewhere
trees/        how each compiled tree was made; its layer lies with the others
logs/         the output of the last build of each kind
"""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.errors import StoreDamaged
from pipeline.files import files_below
from pipeline.oci.record import LayerRecord
from pipeline.store.store import Store, read_own
from pipeline.store.upkeep import StoreSection, tree_sections

# All of it is made again from locks; a month without use is enough to let go of gigabytes.
_UNUSED_S = 30 * 24 * 3600
_PARTS = {
    "unpacked toolchains": "toolchains",
    "compiled objects": "objects",
    "notes on imported objects": "imports",
    "notes on compiled trees": "trees",
    "logs of builds": "logs",
}


def source_sections(store: Store) -> list[StoreSection]:
    """How much of what compiling left."""
    return tree_sections(store, _PARTS)


def source_leftovers(store: Store) -> list[Path]:
    """Toolchains, objects and logs that no build has used for a month, and notes on gone trees.

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
    trees = [path for path in _entries(store.root / "trees") if not _has_layer(store, path)]
    return [*unused, *objects, *trees]


def _has_layer(store: Store, note: Path) -> bool:
    try:
        # a tree's signed statement lies beside its record
        key = note.name.partition(".")[0]
        data = read_own(store.root / "layers" / f"{key}.json")
        record = LayerRecord.model_validate_json(data)
    except (FileNotFoundError, StoreDamaged, ValueError):
        return False
    return store.blob_path(record.digest).exists()


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder of the store; a link leads elsewhere and is not looked into."""
    is_own = folder.is_dir() and not folder.is_symlink()
    return sorted(folder.iterdir()) if is_own else []
