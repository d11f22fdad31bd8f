from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.containers.docker import archive_bytes, docker_archive
from pipeline.artifacts.oci.document import Document, read_document
from pipeline.core.errors import StoreDamaged
from pipeline.core.model import sha256_of
from tests.makers import build_in, make_deb, make_wheel, root_image, wheel_image

TAG = "sm120/child:abc"


class World:
    """A built image."""

    def __init__(self, place: Path) -> None:
        mirror = place / "mirror"
        image = wheel_image("child", [make_wheel(mirror, "pkg")])
        _, self.store, self.built = build_in(place, root_image([make_deb(mirror, "tool")]), image)

    @property
    def image(self) -> Document:
        return read_document(self.store.read_blob(self.built.digest))

    def archive(self, *tags: str) -> bytes:
        return b"".join(docker_archive(self.store, self.image, list(tags)))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def files(raw: bytes) -> dict[str, bytes]:
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        for info in tar:
            handle = tar.extractfile(info)
            assert handle is not None
            assert info.name not in contents
            contents[info.name] = handle.read()
    return contents


def read(raw: bytes, name: str) -> Any:
    return json.loads(files(raw)[name])


def test_every_blob_is_there_under_its_digest(world: World) -> None:
    blobs = {n: d for n, d in files(world.archive(TAG)).items() if n.startswith("blobs/")}
    assert all(sha256_of(data) == "sha256:" + name[13:] for name, data in blobs.items())
    manifest = json.loads(world.store.read_blob(world.built.digest))
    named = [world.built.digest, manifest["config"]["digest"]]
    named += [layer["digest"] for layer in manifest["layers"]]
    assert set(blobs) == {"blobs/" + digest.replace(":", "/") for digest in named}


def test_the_layout_leads_to_the_manifest(world: World) -> None:
    raw = world.archive(TAG)
    (entry,) = read(raw, "index.json")["manifests"]
    data = files(raw)["blobs/" + entry["digest"].replace(":", "/")]
    assert (entry["digest"], entry["size"]) == (world.built.digest, len(data))
    assert read(raw, "oci-layout") == {"imageLayoutVersion": "1.0.0"}
    assert entry["annotations"] == {"io.containerd.image.name": TAG}


def test_dockers_own_manifest_names_config_layers_and_tags(world: World) -> None:
    raw = world.archive(TAG, "other:1")
    (entry,) = read(raw, "manifest.json")
    assert entry["RepoTags"] == [TAG, "other:1"]
    assert all(name in files(raw) for name in [entry["Config"], *entry["Layers"]])
    assert len(entry["Layers"]) == len(world.built.layers)


def test_an_archive_without_tags_is_fine(world: World) -> None:
    assert read(world.archive(), "manifest.json")[0]["RepoTags"] == []


def test_the_same_image_is_the_same_archive(world: World) -> None:
    assert world.archive(TAG) == world.archive(TAG)
    assert world.archive(TAG) != world.archive("other:1")


def test_a_layer_that_is_there_twice_is_sent_once(world: World) -> None:
    manifest = json.loads(world.store.read_blob(world.built.digest))
    manifest["layers"] += manifest["layers"][:1]
    digest = world.store.put_blob(json.dumps(manifest).encode())
    doubled = read_document(world.store.read_blob(digest))
    raw = b"".join(docker_archive(world.store, doubled, [TAG]))
    assert len(read(raw, "manifest.json")[0]["Layers"]) == len(manifest["layers"])
    files(raw)


def test_it_comes_in_pieces_and_about_as_long_as_promised(world: World) -> None:
    pieces = list(docker_archive(world.store, world.image, [TAG]))
    assert len(pieces) > 2 * len(world.built.layers)
    assert abs(sum(map(len, pieces)) - archive_bytes(world.image)) < 20_000


def test_every_entry_is_the_same_age_and_nobodys(world: World) -> None:
    with tarfile.open(fileobj=io.BytesIO(world.archive(TAG))) as tar:
        heads = {(i.mtime, i.mode, i.uid, i.gid, i.uname) for i in tar}
    assert heads == {(315532800, 0o644, 0, 0, "")}


def damaged(world: World, digest: str, raw: bytes | None) -> None:
    path = world.store.blob_path(digest)
    good = path.read_bytes()
    if raw is None:
        path.unlink()
    else:
        path.write_bytes(raw)
    try:
        with pytest.raises(StoreDamaged):
            world.archive(TAG)
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("raw", [None, b"", b"{}"])
def test_a_damaged_manifest_is_refused(world: World, raw: bytes | None) -> None:
    damaged(world, world.built.digest, raw)


@pytest.mark.parametrize("raw", [None, b"", b"x" * 5000])
def test_a_layer_of_another_size_is_refused(world: World, raw: bytes | None) -> None:
    damaged(world, world.built.layers[0].record.digest, raw)


@pytest.mark.parametrize("raw", [None, b"{}"])
def test_a_config_of_another_size_is_refused(world: World, raw: bytes | None) -> None:
    manifest = json.loads(world.store.read_blob(world.built.digest))
    damaged(world, manifest["config"]["digest"], raw)
