"""Objects kept by what they were compiled from, so that only what changed is compiled again.

ccache does it: the key of an object is the hash of the compiler, its flags and the preprocessed
source, or of all files that it was made of. Results are checked by their own checksum when they
are used; what they were compiled into is judged by the golden digest of the image.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.model import Count, Frozen
from pipeline.store.store import Store

_STATS = "stats.log"


class ObjectCounts(Frozen):
    """How many objects a build compiled, and how many it took from before."""

    compiled: Count = 0
    kept: Count = 0


def cache_settings(folder: str) -> dict[str, str]:
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
        "CCACHE_STATSLOG": f"{folder}/{_STATS}",
        "CCACHE_UMASK": "022",
        # a preprocessed file that says where it lies would tell two equal trees apart
        "CCACHE_NOHASHDIR": "1",
    }


def counts_since(store: Store, before: ObjectCounts | None = None) -> ObjectCounts:
    """What ccache did, by the lines it adds to its log for each call of a compiler."""
    path = objects_folder(store) / _STATS
    lines = path.read_text().split() if path.exists() else []
    compiled = lines.count("cache_miss")
    kept = lines.count("direct_cache_hit") + lines.count("preprocessed_cache_hit")
    if before is None:
        return ObjectCounts(compiled=compiled, kept=kept)
    return ObjectCounts(compiled=compiled - before.compiled, kept=kept - before.kept)


def objects_folder(store: Store) -> Path:
    """Where objects lie: of all toolchains, as the compiler is part of every key."""
    return store.root / "objects"
