from __future__ import annotations

import hashlib
import itertools

import pytest

from pipeline.artifacts.oci.record import FileRow, Kind
from pipeline.core.errors import PathConflict
from pipeline.images.assemble.layer import Deflated, Entry, Slice
from pipeline.images.assemble.venv import merge_wheels, misplaced, same_bytes, winner


def file(path: str, owner: str, data: bytes = b"same") -> Entry:
    digest = hashlib.sha256(data).hexdigest()
    return Entry(path, Kind.FILE, 0o644, data, owner=owner, sha256=digest)


def row(path: str, owner: str, data: str = "same", kind: str = "file") -> FileRow:
    return FileRow(path, kind, 0o644, len(data), data if kind == "file" else "", 0, "", owner)


def owners(entries: list[Entry]) -> dict[str, str]:
    return {entry.path: entry.owner for entry in entries}


def test_wheels_that_share_nothing_are_put_together() -> None:
    merged = merge_wheels([[file("a", "one")], [file("b", "two")]], [])
    assert owners(merged) == {"a": "one", "b": "two"}


def test_the_same_bytes_are_no_conflict() -> None:
    merged = merge_wheels([[file("a", "one")], [file("a", "two")]], [])
    assert owners(merged) == {"a": "one"}


def test_the_preferred_wheel_wins_wherever_it_stands() -> None:
    rivals = [[file("a", name, name.encode())] for name in ("one", "two", "three")]
    for order in itertools.permutations(rivals):
        assert owners(merge_wheels(order, ["two"])) == {"a": "two"}


def test_the_first_of_several_preferred_wheels_wins() -> None:
    rivals = [[file("a", name, name.encode())] for name in ("one", "two", "three")]
    assert owners(merge_wheels(rivals, ["other", "three", "two"])) == {"a": "three"}


@pytest.mark.parametrize("prefer", [[], ["three"], ["One"]])
def test_different_bytes_without_a_preferred_wheel_are_refused(prefer: list[str]) -> None:
    groups = [[file("a", "one", b"1")], [file("a", "two", b"2")]]
    with pytest.raises(PathConflict, match=r"^/a: one and two write it"):
        merge_wheels(groups, prefer)


@pytest.mark.parametrize("prefer", [[], ["one"]])
def test_one_wheel_that_writes_a_path_twice_is_refused(prefer: list[str]) -> None:
    with pytest.raises(PathConflict):
        merge_wheels([[file("a", "one", b"1"), file("a", "one", b"2")]], prefer)


@pytest.mark.parametrize("below", ["a/b", "a/b/c"])
@pytest.mark.parametrize("prefer", [[], ["one"], ["two"]])
def test_a_file_where_another_wheel_has_a_folder_is_refused(below: str, prefer: list[str]) -> None:
    groups = [[file("a", "one")], [file(below, "two")]]
    for order in (groups, groups[::-1]):
        with pytest.raises(PathConflict, match=r"^/a: is a file"):
            merge_wheels(order, prefer)


def test_a_name_that_only_begins_alike_is_no_folder() -> None:
    assert len(merge_wheels([[file("a", "one")], [file("ab/c", "two")]], [])) == 2


def test_files_without_a_promise_are_told_apart_by_what_is_known() -> None:
    packed = Entry("a", Kind.FILE, 0o644, Deflated("x", 0, 3, 5, 77))
    assert same_bytes(packed, Entry("a", Kind.FILE, 0o644, Deflated("y", 9, 4, 5, 77)))
    assert not same_bytes(packed, Entry("a", Kind.FILE, 0o644, Deflated("x", 0, 3, 5, 78)))
    assert not same_bytes(packed, Entry("a", Kind.FILE, 0o644, Deflated("x", 0, 3, 6, 77)))
    assert not same_bytes(packed, Entry("a", Kind.FILE, 0o644, Slice("x", 0, 5)))


def test_a_link_is_never_the_same_as_a_file() -> None:
    link = Entry("a", Kind.SYMLINK, 0o777, target="b")
    assert not same_bytes(link, file("a", "one"))
    assert not same_bytes(link, Entry("a", Kind.SYMLINK, 0o777, target="c"))
    assert same_bytes(link, link)


def test_layers_that_agree_need_nothing_on_top() -> None:
    assert misplaced([[row("a", "one")], [row("a", "two")], [row("b", "two")]], []) == []


def test_a_winner_in_the_last_layer_needs_nothing_on_top() -> None:
    assert misplaced([[row("a", "one", "1")], [row("a", "two", "2")]], ["two"]) == []


def test_a_winner_that_a_later_layer_hides_goes_on_top() -> None:
    layers = [[row("a", "one", "1")], [row("a", "two", "2")], [row("b", "two")]]
    assert [(at, row.owner) for at, row in misplaced(layers, ["one"])] == [(0, "one")]


def test_of_three_layers_the_preferred_one_goes_on_top() -> None:
    layers = [[row("a", str(n), str(n))] for n in range(3)]
    assert [at for at, _ in misplaced(layers, ["1"])] == [1]


@pytest.mark.parametrize("prefer", [[], ["three"]])
def test_layers_that_differ_without_a_preferred_wheel_are_refused(prefer: list[str]) -> None:
    with pytest.raises(PathConflict, match=r"^/a: one and two"):
        misplaced([[row("a", "one", "1")], [row("a", "two", "2")]], prefer)


@pytest.mark.parametrize("prefer", [[], ["one"], ["two"]])
def test_a_file_in_one_layer_and_a_folder_in_another_is_refused(prefer: list[str]) -> None:
    layers = [[row("a", "one")], [row("a", "", kind="dir"), row("a/b", "two")]]
    for order in (layers, layers[::-1]):
        with pytest.raises(PathConflict, match=r"^/a: is a file"):
            misplaced(order, prefer)


def test_the_conflict_names_each_wheel_once() -> None:
    with pytest.raises(PathConflict, match=r"^/x: a and b write it"):
        winner("x", ["b", "a", "b"], [])
