"""Taking a whole store away: its own folders and files, and nothing that others put there."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import StoreUnwritable
from pipeline.files import os_errors_explained, remove_tree
from pipeline.store.mark import MARK, OWN, is_store
from pipeline.store.store import Store
from pipeline.store.upkeep import stats_below

# Beside the folders; see pipeline/cli/signing.py for the second.
_FILES = (MARK, "key-offered")


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
    """Remove a store once nobody uses it; returns what is not its own, and stays."""
    with store.alone():
        # the lock and the mark last: until then it is a store, and can be removed again
        for path in sorted(own_parts(store.root), key=lambda p: p.name in ("locks", MARK)):
            _remove(path)
    left = sorted(store.root.iterdir())
    if not left:
        with os_errors_explained(store.root):
            store.root.rmdir()
    return left


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
        if path.exists():
            raise StoreUnwritable(f"{path}: could not be removed", "Whose files are in it?")
        return
    with os_errors_explained(path):
        path.unlink(missing_ok=True)
