from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.images.source.objects import source_leftovers, source_sections

OLD = 1_000_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def place(store: Store, name: str, *, old: bool = False) -> Path:
    path = store.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"12345")
    if old:
        os.utime(path, (OLD, OLD))
    return path


def test_what_compiling_leaves_is_counted(store: Store) -> None:
    for name in ("toolchains/ab/bin/cc", "objects/3/3/xR", "trees/k.json", "logs/a.log"):
        place(store, name)
    shown = {part.name: (part.files, part.size_bytes) for part in source_sections(store)}
    assert shown["unpacked toolchains"] == (1, 5)
    assert shown["compiled objects"] == (1, 5)
    assert shown["notes on compiled trees"] == (1, 5)
    assert shown["logs of builds"] == (1, 5)


def test_what_was_used_this_month_stays(store: Store) -> None:
    for name in ("toolchains/ab/bin/cc", "objects/3/3/xR", "logs/a.log"):
        place(store, name)
    assert source_leftovers(store) == []


def test_what_nothing_used_for_a_month_goes(store: Store) -> None:
    old = [place(store, name, old=True) for name in ("logs/a.log", "objects/3/3/xR")]
    folder = place(store, "toolchains/ab/bin/cc").parents[1]
    os.utime(folder, (OLD, OLD))
    assert sorted(source_leftovers(store)) == sorted([*old, folder])


def test_a_note_on_a_tree_whose_layer_is_gone_goes(store: Store) -> None:
    note = place(store, "trees/0123.json")
    assert source_leftovers(store) == [note]


def test_a_link_in_the_store_is_not_looked_into(store: Store, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kept = elsewhere / "a.log"
    kept.write_bytes(b"mine")
    os.utime(kept, (OLD, OLD))
    for name in ("logs", "objects", "toolchains"):
        (store.root / name).symlink_to(elsewhere)
    assert source_leftovers(store) == []
