"""Look after the store: how much it holds, whether it is undamaged, and what can go."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline.app.workspace import Workspace
from pipeline.artifacts.store import upkeep
from pipeline.artifacts.store.store import Store
from pipeline.artifacts.store.upkeep import StoreSection, sections, tree_sections
from pipeline.core import log
from pipeline.images.gate import upkeep as gate_upkeep
from pipeline.images.source.objects import source_leftovers, source_sections


class Trimmable(NamedTuple):
    """What no built image needs, and what gates and compiling have not used for a month."""

    files: int
    file_bytes: int
    leftovers: int
    leftover_bytes: int


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
            upkeep.repair_store(bad)
    return bad


def trimmable(workspace: Workspace) -> Trimmable:
    """What a trim would remove."""
    store = workspace.store()
    with store.alone():
        unused, paths = _leftovers(store), upkeep.unreachable(store)
        total = sum(p.lstat().st_size for p in paths)
        unused_bytes = sum(map(gate_upkeep.bytes_below, unused))
    return Trimmable(len(paths), total, len(unused), unused_bytes)


def trim_store(workspace: Workspace) -> int:
    """Remove what nothing needs; returns the freed bytes."""
    store = workspace.store()
    # a build that runs now may be about to use what looks unneeded
    with store.alone():
        unused = _leftovers(store)
        return upkeep.remove_unreachable(store) + gate_upkeep.remove(unused)


def _leftovers(store: Store) -> list[Path]:
    return [*gate_upkeep.gate_leftovers(store), *source_leftovers(store)]
