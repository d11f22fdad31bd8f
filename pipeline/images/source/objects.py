"""What compiling leaves in the store, and what of it no build needs any more.

toolchains/   toolchain images, unpacked: a gigabyte each, made again from the image
objects/      compiled objects, by what they were compiled from; ccache keeps them below 30 GB
shared-objects/  the same of builds that take objects of other machines; the two never mix
trees/        how each compiled tree was made; its layer is with the others
logs/         the output of the last build of each kind

ccache does it: the key of an object is the hash of the compiler, its flags and the preprocessed
source, or of all files that it was made of. ccache compares each entry with a checksum when it uses
it, and compiles a damaged one again. A person who may write to the cache can also write an entry
with a right checksum; the golden digest of the image shows whether the result is what it should be.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.artifacts.oci.record import LayerRecord
from pipeline.artifacts.store.store import Store, read_own
from pipeline.artifacts.store.upkeep import UNUSED_S, StoreSection, entries_of, tree_sections
from pipeline.core.errors import StoreDamaged
from pipeline.core.files import files_below, read_plain
from pipeline.core.model import Count, Digest, Frozen

# Of one build, in its own temporary folder: builds at the same time must not count each other's.
STATS = "ccache-stats.log"
_MOST_STATS_BYTES = 64 << 20
# An entry of ccache: a result (R) or a manifest (M) under its hash, in one folder or two.
_ENTRY = re.compile(r"[0-9a-f]/(?:[0-9a-f]/)?[0-9a-v]{20,60}[RM]")


class ObjectCounts(Frozen):
    """How many objects a build compiled, and how many it took from earlier builds."""

    compiled: Count = 0
    kept: Count = 0  # compiled by an earlier build in this store
    imported: Count = 0  # from a folder of objects that other machines share
    manifests: list[Digest] = []  # of records of earlier versions, which could import objects


def count_objects(temporary: Path, *, is_shared: bool = False) -> ObjectCounts:
    """Counts what ccache did in a build, by the lines that it wrote for each compiler."""
    path = temporary / STATS
    # a step may have put anything in its place
    data = read_plain(path, _MOST_STATS_BYTES) if path.is_file() else None
    lines = (data or b"").decode(errors="replace").split()
    hits = lines.count("direct_cache_hit") + lines.count("preprocessed_cache_hit")
    compiled = lines.count("cache_miss")
    # of a shared folder it is not known who compiled what: all of it may be another machine's
    if is_shared:
        return ObjectCounts(compiled=compiled, imported=hits)
    return ObjectCounts(compiled=compiled, kept=hits)


def kept_objects(store: Store) -> dict[str, tuple[int, int]]:
    """Returns inode and size of every object that is kept."""
    folder, known = objects_folder(store), {}
    for name in entries(folder):
        with suppress(OSError):  # ccache makes room
            status = (folder / name).lstat()
            known[name] = (status.st_ino, status.st_size)
    return known


def replaced_objects(store: Store, before: Mapping[str, tuple[int, int]]) -> int:
    """Counts the results that a build wrote again: ccache does so only for damaged ones."""
    now = kept_objects(store)
    # a manifest (M) grows with every new set of flags for a file
    return sum(now.get(name, was) != was for name, was in before.items() if name.endswith("R"))


def entries(folder: Path) -> list[str]:
    """Lists the cache's entries by their path, sorted; ccache also keeps files of its own."""
    found = (path.relative_to(folder).as_posix() for path in folder.glob("[0-9a-f]/**/*[RM]"))
    return sorted(name for name in found if _ENTRY.fullmatch(name))


def objects_folder(store: Store, *, is_shared: bool = False) -> Path:
    """The folder of all toolchains' objects, as the compiler is part of every key."""
    return store.root / ("shared-objects" if is_shared else "objects")


_PARTS = {
    "unpacked toolchains": "toolchains",
    "compiled objects": "objects",
    "shared objects": "shared-objects",
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
    old = time.time() - UNUSED_S
    folders = [entries_of(store.root / place) for place in ("toolchains", "logs")]
    unused = [path for entries in folders for path in entries if path.lstat().st_mtime < old]
    objects = [
        Path(entry.path)
        for place in ("objects", "shared-objects")
        for top in entries_of(store.root / place)
        for entry in files_below(top)
        if entry.stat(follow_symlinks=False).st_mtime < old
    ]
    trees = []
    for note in entries_of(store.root / "trees"):
        try:
            # a tree's signed statement is next to its record
            data = read_own(store.root / "layers" / f"{note.name.partition('.')[0]}.json")
            record = LayerRecord.model_validate_json(data)
            if not store.blob_path(record.digest).exists():
                trees.append(note)
        except (FileNotFoundError, StoreDamaged, ValueError):
            trees.append(note)
    # earlier versions could import objects, and noted which
    return [*unused, *objects, *trees, *entries_of(store.root / "imports")]
