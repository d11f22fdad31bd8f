from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import pytest

from pipeline.artifacts.oci.record import Kind, WrittenLayer
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import NotReproducible, StoreDamaged
from pipeline.evidence.statements.rebuilt import compare_builds
from pipeline.images.assemble import locked_layers as pinned
from pipeline.images.assemble.image import Built, assemble_images
from pipeline.images.assemble.layer import Entry, with_parents, write_layer
from tests.makers import (
    build_in,
    file_in_image,
    folder_fetcher,
    make_deb,
    make_wheel,
    root_image,
    threads,
    wheel_image,
)
from tests.testbed.deb_file import Item, hard_link, symlink


class World:
    """A built image and all that is needed to build it again."""

    def __init__(self, place: Path) -> None:
        self.mirror, self.place = place / "mirror", place
        items = Item("./usr/b", b"words"), hard_link("./usr/a", "./usr/b"), symlink("./usr/c", "b")
        deb = make_deb(self.mirror, "tool", *items)
        image = wheel_image(
            "child", [make_wheel(self.mirror, "pkg", {"pkg.py": b"1", "q.py": b""})]
        )
        self.checkout, self.store, self.first = build_in(place, root_image([deb]), image)

    def again(self) -> Built:
        empty = open_store(self.place / "empty")
        fetcher = folder_fetcher(empty, self.mirror)
        plans = [self.first.plan]
        second = assemble_images(self.checkout, empty, plans, lambda: fetcher, judge=False)[0]
        assert compare_builds(self.store, self.first, empty, second) == ()
        return second

    def other(self, change: dict[str, bytes]) -> tuple[Store, Built]:
        """The image with other wheel contents, in a store of its own."""
        place = self.place / "other"
        deb = self.mirror / "tool_1.0_amd64.deb"
        image = wheel_image("child", [make_wheel(place / "mirror", "pkg", change)])
        (place / "mirror" / deb.name).write_bytes(deb.read_bytes())
        _, store, built = build_in(place, root_image([deb]), image)
        return store, built


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def test_a_rebuild_from_nothing_is_identical(world: World) -> None:
    second = world.again()
    assert (second.digest, second.cached) == (world.first.digest, False)


def test_a_rebuild_that_differs_names_the_file(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(entries: Iterable[Entry], out: BinaryIO) -> WrittenLayer:
        more = Entry("stray", Kind.FILE, 0o644, b"1")
        return write_layer(with_parents([*entries, more]), out)

    empty = open_store(tmp_path / "empty")
    fetcher = folder_fetcher(empty, world.mirror)
    monkeypatch.setattr(pinned, "write_layer", changed)
    plans = [world.first.plan]
    with mock.patch.object(pinned, "_workers", threads):
        second = assemble_images(world.checkout, empty, plans, lambda: fetcher, judge=False)[0]
    with pytest.raises(NotReproducible, match="/stray is only in the second build"):
        compare_builds(world.store, world.first, empty, second)
    assert assemble_images(world.checkout, world.store, plans, lambda: fetcher)[0].cached


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pkg.py": b"2", "q.py": b""}, r"small wheels': .*RECORD differs in sha256"),
        ({"pkg.py": b"1"}, "differs in size_bytes"),
        ({"pkg.py": b"1", "q.py": b"", "a.py": b""}, r"a\.py is only in the second build"),
    ],
)
def test_the_first_difference_is_named(
    world: World, tmp_path: Path, change: dict[str, bytes], message: str
) -> None:
    place, world.place = world.place, tmp_path
    store, second = world.other(change)
    world.place = place
    with pytest.raises(NotReproducible, match=message):
        compare_builds(world.store, world.first, store, second)


def test_other_numbers_of_layers_and_other_configs_are_named(world: World) -> None:
    store, first, record = world.store, world.first, world.first.record
    zeros = {"digest": f"sha256:{'0' * 64}"}
    other = {"descriptor": record.descriptor.model_copy(update=zeros)}
    fewer = replace(first, record=record.model_copy(update={**other, "layers": first.layers[:-1]}))
    for one, again, message in ((first, fewer, "3 layers against 2"), (fewer, first, "2 .* 3")):
        with pytest.raises(NotReproducible, match=message):
            compare_builds(store, one, store, again)
    again = replace(first, record=record.model_copy(update=other))
    with pytest.raises(NotReproducible, match="all layers are equal, the config or manifest"):
        compare_builds(store, first, store, again)


def test_a_file_is_read_as_a_container_would_see_it(world: World) -> None:
    site = "/opt/venv/lib/python3.11/site-packages"
    assert file_in_image(world.store, world.first, f"{site}/pkg.py") == b"1"
    assert file_in_image(world.store, world.first, f"{site}/q.py") == b""
    assert file_in_image(world.store, world.first, "/usr/b") == b"words"
    assert file_in_image(world.store, world.first, "usr/a") == b"words"


@pytest.mark.parametrize("path", ["/nowhere", "/usr", "/usr/c", ""])
def test_what_is_no_file_cannot_be_read(world: World, path: str) -> None:
    assert file_in_image(world.store, world.first, path) is None


def test_a_damaged_blob_is_found(world: World, tmp_path: Path) -> None:
    layer = world.first.layers[1].record
    raw = world.store.blob_path(layer.digest).read_bytes()
    world.store.blob_path(layer.digest).write_bytes(bytes(len(raw)))
    try:
        with pytest.raises(StoreDamaged):
            file_in_image(world.store, world.first, "opt/venv/lib/python3.11/site-packages/pkg.py")
    finally:
        world.store.blob_path(layer.digest).write_bytes(raw)
