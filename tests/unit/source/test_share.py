from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DigestMismatch, DiskFull, ObjectsUnusable
from pipeline.source.objects import count_objects, entries, imports, objects_folder
from pipeline.source.share import MANIFEST, export_objects, import_objects, read_manifest
from pipeline.store.store import Store, open_store
from tests.unit.support import Command, temporary_files

ONE, TWO = "3/3/2db6rpa17uf1s79su1u2phoac5s1ugsR", "a/41pmqseac1ivap48id0dp4njeo87spqM"


def store_with_objects(root: Path) -> Store:
    store = open_store(root)
    for name in (ONE, TWO, "3/3/stats", "tmp/x", "stats.log"):
        path = objects_folder(store) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 100)
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_objects(store_with_objects(tmp_path / "from"), tmp_path / "export")
    return tmp_path / "export"


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return open_store(tmp_path / "to")


def bring(store: Store, folder: Path) -> Any:
    return import_objects(store, folder, *read_manifest(folder))


def test_objects_travel_as_files_and_nothing_else_of_the_cache_does(
    folder: Path, other: Store
) -> None:
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert files == {ONE, TWO, MANIFEST}
    done = bring(other, folder)
    assert (done.objects, done.new) == (2, 2)
    assert entries(objects_folder(other)) == [ONE, TWO]
    assert (objects_folder(other) / ONE).read_bytes() == ONE.encode() * 100
    assert [x.manifest for x in imports(other)] == [done.manifest]
    assert temporary_files(other.root) == []


def test_a_second_import_brings_nothing_new_and_forgets_nothing(folder: Path, other: Store) -> None:
    bring(other, folder)
    assert bring(other, folder).new == 0
    assert [set(x.files) for x in imports(other)] == [{ONE, TWO}]


def test_an_object_that_is_there_is_not_replaced_nor_called_imported(
    folder: Path, other: Store
) -> None:
    mine = objects_folder(other) / ONE
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    assert bring(other, folder).new == 1
    assert mine.read_bytes() == b"mine"
    assert [set(x.files) for x in imports(other)] == [{TWO}]


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        value = json.loads((folder / MANIFEST).read_bytes())
        change(value)
        (folder / MANIFEST).write_text(json.dumps(value))

    return damage


def _named(name: str) -> Callable[[Path], None]:
    return _edit(lambda value: value["files"].update({name: value["files"].pop(TWO)}))


def _linked(folder: Path) -> None:
    (folder / TWO).rename(folder / "there")
    (folder / TWO).symlink_to(folder / "there")


def _folder(folder: Path) -> None:
    (folder / TWO).unlink()
    (folder / TWO).mkdir()


def _piped(folder: Path) -> None:
    (folder / TWO).unlink()
    os.mkfifo(folder / TWO)


BAD: dict[str, Callable[[Path], object]] = {
    "changed": lambda f: (f / TWO).write_bytes(b"x" * (f / TWO).stat().st_size),
    "short": lambda f: os.truncate(f / TWO, 5),
    "long": lambda f: (f / TWO).write_bytes((f / TWO).read_bytes() + b"x"),
    "empty": lambda f: (f / TWO).write_bytes(b""),
    "missing": lambda f: (f / TWO).unlink(),
    "a link": _linked,
    "a pipe": _piped,
    "a folder": _folder,
    "no manifest": lambda f: (f / MANIFEST).unlink(),
    "half a manifest": lambda f: os.truncate(f / MANIFEST, 50),
    "another format": _edit(lambda value: value.update(format=2)),
    "unknown fields": _edit(lambda value: value.update(more=1)),
    "another hash": _edit(lambda value: value["files"][TWO].update(sha256="sha256:" + "0" * 64)),
    "no size": _edit(lambda value: value["files"][TWO].pop("size_bytes")),
    "a path out of it": _named("../../etc/passwd"),
    "an absolute path": _named("/etc/passwd"),
    "ccache's settings": _named("ccache.conf"),
    "a path after a line": _named(f"{TWO}\n"),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD)
def test_an_export_that_is_not_as_its_manifest_says_is_refused_whole(
    folder: Path, other: Store, damage: Callable[[Path], object]
) -> None:
    damage(folder)
    with pytest.raises((ObjectsUnusable, DigestMismatch)):
        bring(other, folder)
    assert entries(objects_folder(other)) == []
    assert list(imports(other)) == []
    assert temporary_files(other.root) == []


def test_an_import_that_does_not_fit_on_the_disk_does_not_begin(
    folder: Path, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Store, n_bytes: int) -> None:
        raise DiskFull(f"{n_bytes} needed")

    monkeypatch.setattr(Store, "need_space", full)
    with pytest.raises(DiskFull):
        bring(other, folder)
    assert entries(objects_folder(other)) == []


@pytest.mark.parametrize("there", [True, False])
def test_an_export_goes_into_a_new_folder_and_needs_objects(tmp_path: Path, there: bool) -> None:
    store = store_with_objects(tmp_path / "s") if there else open_store(tmp_path / "s")
    (tmp_path / "out").mkdir()
    if there:
        (tmp_path / "out" / "mine").touch()
    with pytest.raises(ObjectsUnusable, match="not empty" if there else "holds no objects"):
        export_objects(store, tmp_path / "out")


def test_objects_are_counted_by_where_they_came_from(
    folder: Path, other: Store, tmp_path: Path
) -> None:
    done = bring(other, folder)
    lines = "# a\ncache_miss\n# b\ndirect_cache_hit\n# c\npreprocessed_cache_hit\n"
    (tmp_path / "ccache-stats.log").write_text(lines)
    used = objects_folder(other) / ONE
    os.utime(used, (2_000_000_000, 2_000_000_000))
    os.utime(objects_folder(other) / TWO, (2_000_000_000, 2_000_000_000))
    counts = count_objects(other, tmp_path, 1_999_999_990.0)
    assert (counts.compiled, counts.kept, counts.imported) == (1, 1, 1)
    assert counts.manifests == [done.manifest]
    # one that the build did not touch is not in it
    os.utime(used, (1_000_000_000, 1_000_000_000))
    counts = count_objects(other, tmp_path, 1_999_999_990.0)
    assert (counts.kept, counts.imported, counts.manifests) == (2, 0, [])


def test_only_a_manifest_that_a_trusted_key_signed_is_taken(
    sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_STORE", str(store_with_objects(tmp_path / "mine").root))
    plain, signed = tmp_path / "plain", tmp_path / "signed"
    assert sm120("source", "export-objects", plain).code == 0
    sm120("evidence", "new-key", "builder")
    done = sm120("source", "export-objects", signed)
    assert done.code == 0
    assert "signed by builder" in done.out
    monkeypatch.setenv("SM120_STORE", str(tmp_path / "other"))
    refused = sm120("source", "import-objects", plain)
    assert refused.code == 33
    assert "nobody signed it" in refused.err
    # a signature of one manifest is none of another
    (plain / "manifest.dsse.json").write_bytes((signed / "manifest.dsse.json").read_bytes())
    (plain / MANIFEST).write_bytes((plain / MANIFEST).read_bytes() + b" ")
    refused = sm120("source", "import-objects", plain)
    assert refused.code == 33
    assert "another manifest" in refused.err
    taken = sm120("source", "import-objects", signed, "--json")
    assert taken.code == 0
    assert taken.json["signed_by"] == ["builder"]
    assert sm120("source", "import-objects", plain, "--unsigned").code == 0
