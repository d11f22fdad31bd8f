"""A store is taken away whole, and nothing with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.artifacts.store.store import OWN, open_store
from pipeline.artifacts.store.upkeep import disk_bytes, own_parts, remove_store
from pipeline.core.errors import NotAStore


def test_a_store_goes_with_all_its_folders(store_root: Path) -> None:
    store = open_store(store_root)
    for name in OWN:
        (store_root / name).mkdir(parents=True, exist_ok=True)
        (store_root / name / ("f" * 64)).write_bytes(b"12345")
    (store_root / "key-offered").write_bytes(b"")
    assert disk_bytes(store_root) >= 5 * len(OWN)
    assert remove_store(store) == []
    assert not store_root.exists()


def test_what_others_put_beside_it_stays(store_root: Path) -> None:
    store = open_store(store_root)
    (store_root / "thesis.txt").write_text("mine")
    (store_root / "photos").mkdir()
    assert [p.name for p in remove_store(store)] == ["photos", "thesis.txt"]
    assert sorted(p.name for p in store_root.iterdir()) == ["photos", "thesis.txt"]


def test_a_link_in_a_store_is_not_followed(store_root: Path, tmp_path: Path) -> None:
    store = open_store(store_root)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("kept")
    (store_root / "trees").symlink_to(tmp_path / "elsewhere")
    (store_root / "logs").mkdir()
    (store_root / "logs" / "link").symlink_to(tmp_path / "elsewhere")
    remove_store(store)
    assert (tmp_path / "elsewhere" / "kept").read_text() == "kept"


def test_a_folder_that_is_no_store_has_nothing_to_remove(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    assert own_parts(tmp_path) == []
    assert own_parts(tmp_path / "absent") == []


def test_a_mark_that_is_not_ours_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"kind": "other"}')
    with pytest.raises(NotAStore):
        own_parts(tmp_path)
