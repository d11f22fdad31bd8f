"""Look after the store: how much it holds, whether it is undamaged, and what can go."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline.app.workspace import Workspace
from pipeline.artifacts.store import upkeep
from pipeline.artifacts.store.upkeep import StoreSection, sections, tree_sections
from pipeline.core import log
from pipeline.images.gate import upkeep as gate_upkeep
from pipeline.images.source.objects import source_leftovers, source_sections


class Trimmed(NamedTuple):
    """What no built image needs, and what gates and compiling have not used for a month."""

    files: int
    file_bytes: int
    leftovers: int
    leftover_bytes: int
    freed_bytes: int  # none for a dry run


def sections_of(workspace: Workspace) -> tuple[Path, list[StoreSection]]:
    """Where the store is, and how much each part of it holds."""
    store = workspace.store_to_read()
    gates = tree_sections(store, gate_upkeep.GATE_PARTS)
    return store.root, [*sections(store), *source_sections(store), *gates]


def check_store(workspace: Workspace, *, repair: bool = False) -> list[Path]:
    """Read every file again; returns those that differ from their hash, removed with `repair`."""
    store = workspace.store() if repair else workspace.store_to_read()
    # only removing needs the store alone; reading may go on beside a build
    with store.alone() if repair else store.in_use():
        total = upkeep.total_bytes(store)
        with log.step(f"Reading {log.size(total)}"), log.progress("read", total) as bar:
            bad = upkeep.damaged(store, bar.advance)
        if repair:
            upkeep.remove_files(bad)
    return bad


def trim_store(workspace: Workspace, *, dry_run: bool = False) -> Trimmed:
    """Remove what nothing needs; with `dry_run`, only say what that is."""
    store = workspace.store()
    # a running build may be about to use what looks unneeded
    with store.alone():
        unused = [*gate_upkeep.gate_leftovers(store), *source_leftovers(store)]
        paths = upkeep.unreachable(store)
        total = sum(p.lstat().st_size for p in paths)
        unused_bytes = sum(map(upkeep.bytes_below, unused))
        freed = 0
        if not dry_run:
            freed = upkeep.remove_files(paths) + upkeep.remove_trees(unused)
    return Trimmed(len(paths), total, len(unused), unused_bytes, freed)
