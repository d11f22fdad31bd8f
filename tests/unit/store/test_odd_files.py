"""What is no plain file, or has no end, in the place of a file of the store."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.artifacts.oci.layout import export_layout
from pipeline.artifacts.store.store import Store, read_image_record
from pipeline.artifacts.store.upkeep import damaged, remove_files, unreachable
from pipeline.core.errors import (
    DiskFull,
    FolderInTheWay,
    GoldenMismatch,
    StoreDamaged,
    StoreUnwritable,
)
from pipeline.core.files import is_free, locked
from pipeline.images.assemble.image import find_built
from pipeline.images.assemble.plan import plan_image
from pipeline.images.fetch.inputs import collect
from pipeline.images.gate.evidence import evidence_path, read_evidence
from pipeline.images.lock.model import Pin
from tests import makers

pytestmark = pytest.mark.usefixtures("no_slow_helpers")


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as out:
        out.truncate(40 << 30)


def nested(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def numeral(path: Path) -> None:
    path.write_bytes(b"9" * 6000)


Put = Callable[[Path], None]
ODD: list[Put] = [pipe, folder, endless, huge, nested, numeral]
odd = pytest.mark.parametrize("put", ODD)


class World:
    """A built image, and where its parts lie."""

    def __init__(self, place: Path) -> None:
        mirror = place / "mirror"
        wheel, deb = makers.make_wheel(mirror, "pkg"), makers.make_deb(mirror, "tool")
        images = makers.root_image([deb]), makers.wheel_image("child", [wheel])
        self.checkout = makers.make_checkout(place / "checkout", *images)
        self.store, self.mirror = Store(place / "store"), mirror
        self.store.prepare()
        self.built = self.build()

    def build(self) -> object:
        return makers.build(self.checkout, self.store, self.mirror, "child")[0].digest

    @property
    def record(self) -> Path:
        return self.store.image_folder("child", makers.AMD64) / "image.json"

    def find(self) -> object:
        return find_built(self.store, plan_image(self.checkout, "child", makers.AMD64))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@odd
def test_a_record_of_an_image_that_is_none_is_damaged_and_made_again(
    world: World, put: Put
) -> None:
    put(world.record)
    with pytest.raises(StoreDamaged):
        read_image_record(world.record)
    assert world.find() is None
    assert world.record in damaged(world.store, lambda _: None)
    if put is folder:
        with pytest.raises(FolderInTheWay, match="is a folder"):
            world.build()
        assert world.record.is_dir()
    else:
        assert world.build() == world.built


@odd
def test_a_manifest_that_is_none_is_damaged_and_made_again(world: World, put: Put) -> None:
    digest = str(world.built)
    put(world.store.blob_path(digest))
    with pytest.raises(StoreDamaged):
        world.store.read_blob(digest)
    assert world.find() is None
    if put is not huge:  # a check reads it whole, as it does a layer
        assert world.store.blob_path(digest) in damaged(world.store, lambda _: None)
    if put is not folder:
        assert world.build() == world.built


@pytest.mark.parametrize("put", [pipe, folder, endless, nested, numeral])
def test_the_memory_of_layers_and_their_tables_are_made_again(world: World, put: Put) -> None:
    for path in (world.store.root / "layers").iterdir():
        put(path)
    world.record.unlink()
    if put is folder:
        with pytest.raises(FolderInTheWay):
            world.build()
        return
    assert world.build() == world.built


@odd
def test_a_table_of_contents_that_is_none_is_reported_as_damaged(world: World, put: Put) -> None:
    (path, *_) = (world.store.root / "contents").iterdir()
    layer = makers.image_record(f"sha256:{path.stem}").layers[0].record
    put(path)
    with pytest.raises(StoreDamaged):
        world.store.contents(layer)
    if put in (pipe, folder, endless, huge):
        with pytest.raises(StoreDamaged):
            world.store.find_rows(layer, "x")
    assert path in damaged(world.store, lambda _: None)


@odd
def test_a_gate_result_that_is_none_is_reported_as_damaged(world: World, put: Put) -> None:
    put(evidence_path(world.store, "child", makers.AMD64))
    with pytest.raises(StoreDamaged, match="the record of its gates cannot be read"):
        read_evidence(world.store, "child", makers.AMD64, str(world.built))


@pytest.mark.parametrize("base", [5, "sha256:x", [5], {"a": 1}, None])
def test_a_record_with_another_base_than_digests_is_damaged(world: World, base: object) -> None:
    record = world.store.image_record("child", makers.AMD64)
    assert record is not None
    world.store.keep_image(
        "root", makers.AMD64, record.model_copy(update={"base": ("sha256:" + "a" * 64,)})
    )
    assert unreachable(world.store) is not None
    path = world.record
    path.write_text(path.read_text().replace('"code"', f'"base":{json.dumps(base)},"code"'))
    with pytest.raises(StoreDamaged):
        unreachable(world.store)


def test_a_repair_takes_pipes_and_links_and_leaves_a_folder_to_its_owner(world: World) -> None:
    blobs = world.store.root / "oci" / "blobs" / "sha256"
    pipe(blobs / ("a" * 64))
    endless(blobs / ("b" * 64))
    bad = damaged(world.store, lambda _: None)
    assert [p.name[0] for p in bad] == ["a", "b"]
    remove_files(bad)
    assert damaged(world.store, lambda _: None) == []
    folder(blobs / ("c" * 64))
    (blobs / ("c" * 64) / "precious").write_text("mine")
    with pytest.raises(FolderInTheWay):
        remove_files(damaged(world.store, lambda _: None))
    assert (blobs / ("c" * 64) / "precious").exists()


def test_a_pipe_in_the_place_of_a_lock_holds_nobody_up(tmp_path: Path) -> None:
    pipe(tmp_path / "lock")
    with locked(tmp_path / "lock", shared=True):
        assert not is_free(tmp_path / "lock")


def test_a_folder_where_a_collected_file_belongs_is_named_and_stays(world: World) -> None:
    pins: list[Pin] = list(plan_image(world.checkout, "child", makers.AMD64).lock.wheels)
    to = world.mirror.parent / "to"
    (to / pins[0].file / "precious").mkdir(parents=True)
    with pytest.raises(StoreUnwritable, match=f"{pins[0].file}: is a folder") as refused:
        collect(world.store, makers.folder_fetcher(world.store, world.mirror), pins, to)
    assert "SM120_STORE" not in refused.value.hint
    assert [p.name for p in to.iterdir()] == [pins[0].file]


def test_a_store_whose_memory_of_layers_was_exchanged_is_suspected_before_the_builder(
    world: World,
) -> None:
    one, other, *_ = sorted((world.store.root / "layers").iterdir())
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    world.record.unlink()
    with pytest.raises(GoldenMismatch) as refused:
        makers.build(world.checkout, world.store, world.mirror, "child", accept=False)
    assert "--store DIR" in refused.value.hint
    assert not world.record.exists()


def test_an_export_describes_the_manifest_as_it_is(world: World, tmp_path: Path) -> None:
    text = world.record.read_text()
    record = json.loads(text)
    record["descriptor"] |= {"size": 5, "mediaType": "text/other"}
    world.record.write_text(json.dumps(record))
    built = find_built(world.store, plan_image(world.checkout, "child", makers.AMD64))
    assert built is not None
    export_layout(world.store, built.record, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "index.json").read_bytes())
    assert index["manifests"] == [json.loads(text)["descriptor"]]


def test_an_export_that_finds_no_space_says_that_nothing_was_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = find_built(world.store, plan_image(world.checkout, "child", makers.AMD64))
    assert built is not None
    monkeypatch.setattr("pipeline.core.files.link_or_copy", half_a_copy)
    with pytest.raises(DiskFull) as full:
        export_layout(world.store, built.record, tmp_path / "usb")
    assert full.value.hint.startswith("Nothing was written.")
    assert not [path.name for path in tmp_path.iterdir() if "usb" in path.name]


def test_an_export_to_a_disk_without_space_copies_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, other_disk: Path
) -> None:
    built = find_built(world.store, plan_image(world.checkout, "child", makers.AMD64))
    assert built is not None
    monkeypatch.setattr("pipeline.core.files.free_bytes", lambda folder: 99)
    monkeypatch.setattr("pipeline.core.files.link_or_copy", half_a_copy)
    with tempfile.TemporaryDirectory(dir=other_disk) as disk:
        with pytest.raises(DiskFull, match=r"usb: .* needed, 99 B free") as full:
            export_layout(world.store, built.record, Path(disk) / "usb")
        assert full.value.hint.startswith("Nothing was written.")
        assert not list(Path(disk).iterdir())


def half_a_copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes()[:1])
    raise OSError(errno.ENOSPC, "No space left on device")
