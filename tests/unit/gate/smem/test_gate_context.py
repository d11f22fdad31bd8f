"""Files out of finished layers, as gates import them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import StoreDamaged
from pipeline.core.model import sha256_of
from pipeline.images.assemble.layer import Entry, write_layer
from pipeline.images.gate.smem.engine import unpack_kept

BIG = os.urandom(2_500_000)
LOWER = [
    Entry("bin", Kind.DIR, 0o755),
    Entry("bin/also", Kind.HARDLINK, 0o755, target="bin/tool"),
    Entry("bin/far", Kind.SYMLINK, 0o777, target="/etc/passwd"),
    Entry("bin/near", Kind.SYMLINK, 0o777, target="tool"),
    Entry("bin/tool", Kind.FILE, 0o755, b"old"),
    Entry("bin/up", Kind.SYMLINK, 0o777, target="lib/../../tool"),
    Entry("lib/deep/empty", Kind.FILE, 0o644, b""),
    Entry("lib/large.so", Kind.FILE, 0o644, BIG),
]
UPPER = [Entry("bin/tool", Kind.FILE, 0o644, b"newer")]


def kept(store: Store, entries: list[Entry]) -> LayerRecord:
    with store.new_blob() as blob:
        with blob.path.open("wb") as out:
            facts = write_layer(entries, out)
        blob.keep(facts.record.digest)
    return store.keep_layer(facts.record.digest, facts)


@pytest.fixture
def store(store_root: Path) -> Store:
    return open_store(store_root)


def all_below(row: FileRow) -> str:
    return f"root/{row.path}"


def test_files_and_near_links_are_written_each_with_its_mode(store: Store, tmp_path: Path) -> None:
    unpack_kept(store, [kept(store, LOWER)], all_below, tmp_path / "to")
    result = {
        str(p.relative_to(tmp_path / "to")): p
        for p in (tmp_path / "to").rglob("*")
        if not p.is_dir()
    }
    # links that lead out, and hard links, are left out
    assert sorted(result) == [
        *("root/bin/near", "root/bin/tool", "root/lib/deep/empty", "root/lib/large.so")
    ]
    assert result["root/bin/near"].readlink() == Path("tool")
    assert result["root/bin/tool"].read_bytes() == b"old"
    assert result["root/bin/tool"].stat().st_mode & 0o777 == 0o755
    assert result["root/lib/large.so"].read_bytes() == BIG
    assert result["root/lib/large.so"].stat().st_mode & 0o777 == 0o644


def test_a_later_layer_wins(store: Store, tmp_path: Path) -> None:
    layers = [kept(store, LOWER), kept(store, UPPER)]
    unpack_kept(store, layers, all_below, tmp_path / "to")
    tool = tmp_path / "to" / "root" / "bin" / "tool"
    assert tool.read_bytes() == b"newer"
    assert tool.stat().st_mode & 0o777 == 0o644


def test_only_what_is_given_a_place_is_written(store: Store, tmp_path: Path) -> None:
    def place(row: FileRow) -> str | None:
        return "here/tool" if row.path == "bin/tool" else None

    unpack_kept(store, [kept(store, LOWER)], place, tmp_path / "to")
    assert [p.name for p in (tmp_path / "to" / "here").iterdir()] == ["tool"]
    unpack_kept(store, [kept(store, LOWER)], lambda row: None, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_layer_is_told_not_unpacked(store: Store, tmp_path: Path, damage: str) -> None:
    record = kept(store, LOWER)
    blob = store.blob_path(record.digest)
    data = bytearray(blob.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    blob.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    if damage == "gone":
        blob.unlink()
    with pytest.raises(StoreDamaged):
        unpack_kept(store, [record], all_below, tmp_path / "to")


def test_a_layer_written_here_is_the_one_that_is_read(store: Store) -> None:
    out = io.BytesIO()
    assert write_layer(LOWER, out).record.digest == sha256_of(out.getvalue())
