"""Finding one row of a table of contents without reading it all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.oci.record import FileRow, LayerRecord, WrittenLayer
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import StoreDamaged

NAMES = st.text(st.sampled_from('ab/"\\],[é\n.'), min_size=1, max_size=12)
DIGEST = "sha256:" + "ab" * 32
LAYER = LayerRecord(digest=DIGEST, diff_id=DIGEST, size_bytes=1, unpacked_bytes=1)


def row(path: str, target: str = "", owner: str = "w") -> FileRow:
    return FileRow(path, "file", 0o644, 1, "0" * 64, 7, target, owner)


def store_with(folder: Path, rows: Sequence[FileRow]) -> Store:
    store = open_store(folder)
    store.keep_layer(DIGEST, WrittenLayer(LAYER, list(rows)))
    return store


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), max_size=8), NAMES)
def test_a_search_finds_what_a_full_read_finds(
    names: list[tuple[str, str, str]], suffix: str
) -> None:
    rows = [row(*n) for n in names]
    with tempfile.TemporaryDirectory() as folder:
        store = store_with(Path(folder), rows)
        assert store.contents(LAYER) == rows
        assert store.find_rows(LAYER, suffix) == [r for r in rows if r.path.endswith(suffix)]


def test_a_link_target_or_an_owner_of_that_name_is_no_hit(tmp_path: Path) -> None:
    rows = [row("x", target="a/RECORD"), row("y", owner="RECORD"), row("a/RECORD")]
    assert store_with(tmp_path, rows).find_rows(LAYER, "RECORD") == [row("a/RECORD")]


def test_an_empty_table_holds_nothing(tmp_path: Path) -> None:
    assert store_with(tmp_path, []).find_rows(LAYER, "x") == []
    assert json.loads(next((tmp_path / "contents").iterdir()).read_bytes()) == []


@pytest.mark.parametrize("damage", [b'[\n["a/x",', b'[\n["a/x",7\n'])
def test_a_table_cut_short_is_an_error(tmp_path: Path, damage: bytes) -> None:
    store = store_with(tmp_path, [])
    next((tmp_path / "contents").iterdir()).write_bytes(damage)
    with pytest.raises(StoreDamaged, match="table of contents"):
        store.find_rows(LAYER, "a/x")
