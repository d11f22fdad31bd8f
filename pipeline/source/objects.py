"""Objects kept by what they were compiled from, so that only what changed is compiled again.

ccache does it: the key of an object is the hash of the compiler, its flags and the preprocessed
source, or of all files that it was made of. Each entry has a checksum of its own, which ccache
compares when it uses it: one that was cut short or changed by accident is compiled again. Somebody
who may write to the cache can write an entry with a right checksum, though; that the result is
what it should be is for the golden digest of the image to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.errors import StoreDamaged
from pipeline.files import read_plain
from pipeline.model import Count, Digest, Frozen
from pipeline.store.store import Store, read_own

# Of one build, in its own temporary folder: builds at the same time must not count each other's.
STATS = "ccache-stats.log"
_MOST_STATS_BYTES = 64 << 20
# An entry of ccache: a result (R) or a manifest (M) under its hash, in one folder or two.
ENTRY = re.compile(r"[0-9a-f]/(?:[0-9a-f]/)?[0-9a-v]{20,60}[RM]")


class ObjectCounts(Frozen):
    """How many objects a build compiled, and how many it took from before."""

    compiled: Count = 0
    kept: Count = 0  # compiled by an earlier build in this store
    imported: Count = 0  # brought here from elsewhere
    manifests: list[Digest] = []  # of the exports that those came with


class ImportedObjects(Frozen):
    """What is remembered of an import: whose objects these are."""

    manifest: Digest
    signed_by: list[str] = []
    files: dict[str, Digest]


def cache_settings(folder: str, temporary: str) -> dict[str, str]:
    """ccache's settings: all that decides an object's bytes is part of its key."""
    return {
        # CMake reads these when it configures
        "CMAKE_C_COMPILER_LAUNCHER": "ccache",
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        "CMAKE_CUDA_COMPILER_LAUNCHER": "ccache",
        "CCACHE_DIR": folder,
        "CCACHE_CONFIGPATH": f"{folder}/none",  # no settings but these
        "CCACHE_COMPILERCHECK": "content",
        "CCACHE_COMPRESSLEVEL": "5",
        "CCACHE_MAXSIZE": "30G",
        "CCACHE_STATSLOG": f"{temporary}/{STATS}",
        "CCACHE_UMASK": "022",
        # a preprocessed file that says where it lies would tell two equal trees apart
        "CCACHE_NOHASHDIR": "1",
    }


def count_objects(store: Store, temporary: Path, since: float) -> ObjectCounts:
    """What ccache did in a build that began at a time, by the lines it wrote for each compiler.

    ccache renews the time of an entry that it uses; so it is known which of the imported ones were.
    """
    path = temporary / STATS
    # a step may have put anything in its place
    data = read_plain(path, _MOST_STATS_BYTES) if path.is_file() else None
    lines = (data or b"").decode(errors="replace").split()
    hits = lines.count("direct_cache_hit") + lines.count("preprocessed_cache_hit")
    used = {x.manifest: n for x in imports(store) if (n := _used(store, x.files, since))}
    imported = min(hits, sum(used.values()))
    return ObjectCounts(
        compiled=lines.count("cache_miss"),
        kept=hits - imported,
        imported=imported,
        manifests=sorted(used) if imported else [],
    )


def _used(store: Store, files: Mapping[str, str], since: float) -> int:
    folder, count = objects_folder(store), 0
    for name in files:
        path = folder / name
        # times of files are those of the kernel's last tick, which may lie before the clock's
        if name.endswith("R") and path.is_file() and path.stat().st_mtime >= since - 1:
            count += 1
    return count


def kept_objects(store: Store) -> dict[str, tuple[int, int]]:
    """The results that are kept, each by its inode and size."""
    folder, known = objects_folder(store), {}
    for name in entries(folder):
        with suppress(OSError):  # ccache makes room
            status = (folder / name).lstat()
            known[name] = (status.st_ino, status.st_size)
    return known


def replaced_objects(store: Store, before: Mapping[str, tuple[int, int]]) -> int:
    """How many kept results a build wrote anew: ccache does so only where one was damaged."""
    now = kept_objects(store)
    # a manifest (M) grows with every way to compile a file
    return sum(now.get(name, was) != was for name, was in before.items() if name.endswith("R"))


def imports(store: Store) -> Iterator[ImportedObjects]:
    """All imports into this store."""
    folder = imports_folder(store)
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            yield ImportedObjects.model_validate_json(read_own(path))
        except ValueError as error:
            raise StoreDamaged(f"{path}: the record of an import is damaged") from error


def entries(folder: Path) -> list[str]:
    """The cache's entries by their path, sorted; what else ccache keeps there is its own affair."""
    found = (path.relative_to(folder).as_posix() for path in folder.glob("[0-9a-f]/**/*[RM]"))
    return sorted(name for name in found if ENTRY.fullmatch(name))


def objects_folder(store: Store) -> Path:
    """Where objects lie: of all toolchains, as the compiler is part of every key."""
    return store.root / "objects"


def imports_folder(store: Store) -> Path:
    """Where it is remembered which objects came from elsewhere."""
    return store.root / "imports"
