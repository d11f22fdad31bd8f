"""Finding one row of a table of contents without reading it all."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.oci.record import FileRow
from pipeline.artifacts.store.store import dump_table, search_table

NAMES = st.text(st.sampled_from('ab/"\\],[é\n.'), min_size=1, max_size=12)


def row(path: str, target: str = "", owner: str = "w") -> FileRow:
    return FileRow(path, "file", 0o644, 1, "0" * 64, 7, target, owner)


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), max_size=8), NAMES)
def test_a_search_finds_what_a_full_read_finds(
    names: list[tuple[str, str, str]], suffix: str
) -> None:
    rows = [row(*n) for n in names]
    wanted = [r for r in rows if r.path.endswith(suffix)]
    assert search_table(dump_table(rows), suffix) == wanted


def test_a_link_target_or_an_owner_of_that_name_is_no_hit() -> None:
    rows = [row("x", target="a/RECORD"), row("y", owner="RECORD"), row("a/RECORD")]
    assert search_table(dump_table(rows), "RECORD") == [row("a/RECORD")]


def test_an_empty_table_holds_nothing() -> None:
    assert search_table(dump_table([]), "x") == []
    assert json.loads(dump_table([])) == []


@pytest.mark.parametrize("damage", [b'[\n["a/x",', b'[\n["a/x",7\n'])
def test_a_table_cut_short_is_an_error(damage: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        search_table(damage, "a/x")
