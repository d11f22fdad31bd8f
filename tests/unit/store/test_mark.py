"""Only a folder that is marked as a store is written, swept or trimmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import FOLDERS, MARK, Store, open_store, open_to_read
from pipeline.artifacts.store.upkeep import damaged, remove_files, unreachable
from pipeline.core.errors import NotAStore
from tests.unit.support import (
    ROOT,
    Command,
    make_checkout,
    make_wheel,
    misnamed,
    temporary_files,
)

HEX = "ab" * 32


def tree(root: Path) -> dict[str, object]:
    """All of a folder: what files hold, where links lead."""
    return {
        str(p.relative_to(root)): p.readlink() if p.is_symlink() else p.is_file() and p.read_bytes()
        for p in sorted(root.rglob("*"))
    }


def unmarked(root: Path) -> Path:
    """All folders of a store, without its mark."""
    open_store(root)
    (root / "store.json").unlink()
    return root


def folder_with_tmp(root: Path) -> None:
    (root / "tmp" / "photos").mkdir(parents=True)
    (root / "tmp" / "photos" / "one.jpg").write_bytes(b"mine")


def folder_with_a_layout(root: Path) -> None:
    """An OCI layout of somebody's, with a folder of work beside it."""
    (root / "oci" / "blobs" / "sha256").mkdir(parents=True)
    (root / "oci" / "oci-layout").write_bytes(b'{"imageLayoutVersion":"1.0.0"}\n')
    folder_with_tmp(root)


def folder_with_links(root: Path) -> None:
    """All names of a store, one of them leading elsewhere."""
    unmarked(root)
    shutil.rmtree(root / "tmp")
    folder_with_tmp(root.parent / "elsewhere")
    (root / "tmp").symlink_to(root.parent / "elsewhere" / "tmp")


OTHER_FOLDERS = [
    folder_with_tmp,
    folder_with_a_layout,
    folder_with_links,
    unmarked,
    lambda root: (root / "notes.txt").write_text("x"),
    lambda root: (root / ".hidden").mkdir(),
    lambda root: (root / "store.json").write_text("{}"),
    lambda root: (root / "store.json").write_text('{"kind": "a shop", "format": 1}'),
    lambda root: (root / "store.json").write_text(
        '{"kind": "sm120 store", "format": 2, "more": 1}'
    ),
    lambda root: (root / "store.json").write_bytes(b"\xff" * 10_000),
    lambda root: (root / "store.json").mkdir(),
    lambda root: (root / "store.json").symlink_to("/dev/zero"),
]


@pytest.mark.parametrize("make", OTHER_FOLDERS)
def test_a_folder_that_is_no_store_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    root = tmp_path / "home" / "work"
    root.mkdir(parents=True)
    make(root)
    before = tree(tmp_path / "home")
    for open_it in (open_store, open_to_read):
        with pytest.raises(NotAStore) as caught:
            open_it(root)
        assert str(root) in str(caught.value)
        assert caught.value.hint
    assert tree(tmp_path / "home") == before


@pytest.mark.parametrize(
    "args", [["build"], ["image", "list"], ["plan"], ["store", "trim", "--yes"], ["store", "check"]]
)
def test_no_command_touches_a_folder_that_is_no_store(
    tmp_path: Path, sm120: Command, args: list[str]
) -> None:
    make_checkout(tmp_path, [make_wheel(tmp_path / "mirror", "thing")])
    folder_with_tmp(tmp_path / "mine")
    before = tree(tmp_path / "mine")
    ended = sm120("--store", tmp_path / "mine", *args)
    assert (ended.error, ended.out) == ("NotAStore", "")
    assert "is not a store" in ended.err
    assert "Traceback" not in ended.err
    assert tree(tmp_path / "mine") == before


def test_a_new_store_is_marked_before_anything_else_is_in_it(tmp_path: Path) -> None:
    code = "import os, sys\nfrom pathlib import Path\n"
    code += "from pipeline.artifacts.store.store import open_store\n"
    code += "real = Path.mkdir\n"
    code += "def mkdir(self, *a, **k):\n"
    code += "    if self.name == 'oci': os.kill(os.getpid(), 9)\n    return real(self, *a, **k)\n"
    code += "Path.mkdir = mkdir\nopen_store(Path(sys.argv[1]))\n"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False, cwd=ROOT)
    assert done.returncode == -9
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["store.json"]
    open_store(tmp_path / "s")
    assert json.loads((tmp_path / "s" / "store.json").read_bytes()) == {
        "kind": "sm120 store",
        "format": 1,
    }


def test_a_new_disk_is_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert open_store(tmp_path).tmp.is_dir()
    assert (tmp_path / "lost+found").is_dir()


def test_a_mark_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    (root / "store.json").touch()
    open_to_read(root)
    open_store(root)
    assert json.loads((root / "store.json").read_bytes())["format"] == 1
    assert not list(root.rglob(".new-*"))


def test_an_empty_mark_makes_no_store_of_a_folder_with_other_things(tmp_path: Path) -> None:
    (tmp_path / "store.json").touch()
    folder_with_tmp(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(NotAStore, match="it holds 'tmp'"):
        open_store(tmp_path)
    assert tree(tmp_path) == before


def test_many_may_make_one_store_at_the_same_time(tmp_path: Path) -> None:
    for number in range(10):
        root = tmp_path / str(number)
        with ThreadPoolExecutor(8) as pool:
            stores = list(pool.map(open_store, [root] * 8))
        assert {store.root for store in stores} == {root}
        assert (root / "store.json").is_file()


@pytest.mark.parametrize("name", ["tmp", "inputs", "partial", "contents", "locks", "oci", "gate"])
def test_a_store_whose_own_folder_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    open_store(root)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "in").mkdir()
    (elsewhere / HEX).write_bytes(b"mine")
    shutil.rmtree(root / name, ignore_errors=True)
    (root / name).symlink_to(elsewhere)
    for open_it in (open_store, open_to_read):
        with pytest.raises(NotAStore, match=f"{name}: is a symlink"):
            open_it(root)
    assert tree(elsewhere) == {"in": False, HEX: b"mine"}


@pytest.mark.parametrize(
    "command", [["image", "list"], ["store", "show"], ["store", "trim"], ["build"]]
)
@pytest.mark.parametrize("place", ["loop", "nowhere", "file", "x" * 300, "y/" * 3000])
def test_a_place_where_no_folder_can_be_is_reported_in_one_line(
    tmp_path: Path, sm120: Command, place: str, command: list[str]
) -> None:
    make_checkout(tmp_path, [make_wheel(tmp_path / "mirror", "thing")])
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("absent")
    (tmp_path / "file").touch()
    before = tree(tmp_path)
    ended = sm120("--store", tmp_path / place, *command)
    assert ended.error in ("StoreUnwritable", "NotAStore")
    assert len(ended.err.splitlines()) == 2
    assert "Error" not in ended.err
    assert tree(tmp_path) == before


def test_a_store_may_itself_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    open_store(tmp_path / "store")
    assert (tmp_path / "disk" / "store.json").is_file()


def test_links_in_tmp_are_not_followed_by_a_sweep(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    elsewhere = tmp_path / "elsewhere"
    folder_with_tmp(elsewhere)
    (store.tmp / "whole").symlink_to(elsewhere)
    (store.tmp / "dead").mkdir()
    (store.tmp / "dead" / "below").symlink_to(elsewhere)
    (store.tmp / "odd").mkdir()
    (store.tmp / "odd" / "in-use").symlink_to(elsewhere / "tmp" / "photos" / "one.jpg")
    before = tree(elsewhere)
    store.sweep()
    assert tree(elsewhere) == before
    assert sorted(p.name for p in store.tmp.iterdir()) == ["odd", "whole"]


def test_a_sweep_of_an_unmarked_folder_removes_nothing(tmp_path: Path) -> None:
    folder_with_tmp(tmp_path)
    before = tree(tmp_path)
    Store(tmp_path).sweep()
    assert tree(tmp_path) == before


def test_trim_and_repair_take_only_what_a_store_names(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    folders = [store.root / n for n in ("inputs", "partial", "contents", "oci/blobs/sha256")]
    for folder in folders:
        (folder / "thesis.pdf").write_bytes(b"mine")
        os.utime(folder / "thesis.pdf", (0, 0))
    (store.root / "inputs" / HEX).write_bytes(b"old")
    remove_files(damaged(store, lambda n_bytes: None))
    assert not (store.root / "inputs" / HEX).exists()
    (store.root / "inputs" / HEX).write_bytes(b"old")
    assert remove_files(unreachable(store)) == 3
    assert all((folder / "thesis.pdf").read_bytes() == b"mine" for folder in folders)


def test_a_link_in_the_place_of_a_blob_is_damage_and_only_the_link_goes(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    mine = tmp_path / "mine"
    mine.write_bytes(b"{}")
    place = store.blob_path(store.put_blob(b"{}"))
    place.unlink()
    place.symlink_to(mine)
    assert damaged(store, lambda n_bytes: None) == [place]
    remove_files([place])
    assert not place.is_symlink()
    assert mine.read_bytes() == b"{}"


@pytest.mark.parametrize("made", [*range(len(FOLDERS))])
def test_a_store_whose_making_was_stopped_is_swept_and_made_to_the_end(
    tmp_path: Path, made: int
) -> None:
    (tmp_path / MARK).write_bytes(b'{"format":1,"kind":"sm120 store"}\n')
    for name in FOLDERS[:made]:
        (tmp_path / name).mkdir()
    Store(tmp_path).sweep()
    assert temporary_files(tmp_path) == misnamed(tmp_path) == []
    open_store(tmp_path).sweep()
    assert all((tmp_path / name).is_dir() for name in FOLDERS)
