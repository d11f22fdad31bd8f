"""A set as an OCI image: what is in it, that its digest stays, and that nothing wrong is sent."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.oci.document import PLAIN_LAYER
from pipeline.core.errors import StoreDamaged, WeightsDamaged
from pipeline.weights import image as image_module
from pipeline.weights.image import SetBlob, set_image
from pipeline.weights.place import LockedFolder
from tests.testbed.locked_set import SMALL, make_set, random_bytes
from tests.testbed.oci_door import Door
from tests.unit.support import Command

MB = 1 << 20
LARGE = {
    "model-1.safetensors": random_bytes(8 * MB + 7, 1),
    "sub/model-2.safetensors": random_bytes(9 * MB, 2),
    "tokenizer.model": random_bytes(5000, 3),
}
ALL = {**SMALL, **LARGE}


@pytest.fixture
def place(tmp_path: Path) -> LockedFolder:
    return make_set(tmp_path / "set", SMALL, LARGE)


def bytes_of(blob: SetBlob) -> bytes:
    return b"".join(blob.pieces(0, blob.size_bytes))


def layers_of(place: LockedFolder) -> list[SetBlob]:
    return [blob for blob in set_image(place).blobs if isinstance(blob, SetBlob)]


def test_an_image_holds_every_file_a_large_one_in_a_layer_of_its_own(place: LockedFolder) -> None:
    found: dict[str, bytes] = {}
    names = []
    for layer in layers_of(place):
        data = bytes_of(layer)
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == layer.digest
        assert len(data) == layer.size_bytes
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            names.append([member.name for member in tar if member.isfile()])
            for member in tar:
                assert (member.uid, member.gid, member.mtime) == (0, 0, 315532800)
                assert member.mode == (0o755 if member.isdir() else 0o644)
                if member.isfile():
                    file = tar.extractfile(member)
                    assert file is not None
                    found[member.name] = file.read()
    assert found == ALL
    assert names[1:] == [["model-1.safetensors"], ["sub/model-2.safetensors"]]


def test_any_part_of_a_layer_can_be_sent(place: LockedFolder) -> None:
    """As an upload asks for it that goes on after a break."""
    layer = layers_of(place)[1]
    data = bytes_of(layer)
    for start, length in ((0, 1), (500, 100), (511, 2), (MB, 3 * MB), (len(data) - 1024, 1024)):
        assert b"".join(layer.pieces(start, length)) == data[start : start + length]


def test_the_digest_follows_from_the_lock_alone(place: LockedFolder, tmp_path: Path) -> None:
    other = make_set(tmp_path / "elsewhere", SMALL, LARGE)
    for path in other.root.rglob("*.safetensors"):
        path.chmod(0o600)
    cached = make_set(tmp_path / "cache", SMALL, LARGE, hub_cache=True)
    images = [set_image(each) for each in (place, other, cached)]
    assert len({image.root.digest for image in images}) == 1
    # a change of the format changes the digest of every set: then say so in the changelog
    assert images[0].root.digest == (
        "sha256:ed09ca94b20f894cff7cc4b6a6e871fc3ecee18881042a0b27d946e4eabb5404"
    )
    changed = make_set(tmp_path / "changed", SMALL, {**LARGE, "tokenizer.model": b"other"})
    mine, theirs = images[0], set_image(changed)
    assert theirs.root.digest != mine.root.digest
    # only the layer of the small files is another one
    assert len({b.digest for b in mine.blobs} & {b.digest for b in theirs.blobs}) == 2


def test_both_processors_have_the_same_layers(place: LockedFolder) -> None:
    image = set_image(place)
    assert [*image.images] == ["linux/amd64", "linux/arm64"]
    amd64, arm64 = image.images.values()
    assert amd64.layers == arm64.layers
    assert {layer.media_type for layer in amd64.layers} == {PLAIN_LAYER}
    configs: list[dict[str, Any]] = [
        json.loads(b.data) for b in image.blobs if not isinstance(b, SetBlob)
    ]
    assert [config["architecture"] for config in configs] == ["amd64", "arm64"]
    assert configs[0]["rootfs"]["diff_ids"] == [layer.digest for layer in amd64.layers]
    assert [each.digest for each in image.root.manifests] == [amd64.digest, arm64.digest]
    assert image.root.annotations["sm120.weights"] == place.lock.seal


def test_more_files_than_layers_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "_MOST_LAYERS", 2)
    monkeypatch.setattr(image_module, "_LARGE_BYTES", 1000)
    large = {f"part-{n}.safetensors": random_bytes(1000 + n, n) for n in range(5)}
    layers = layers_of(make_set(tmp_path / "set", {"a.json": b"{}"}, large))
    assert [layer.part for layer in layers] == [
        "a.json",
        "3 files from part-0.safetensors on",
        "2 files from part-3.safetensors on",
    ]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("path", ["model-1.safetensors", "config.json"])
def test_a_changed_file_is_named_and_makes_no_image(place: LockedFolder, path: str) -> None:
    _flip(place.root / path)
    with pytest.raises(WeightsDamaged, match=f"{path} is [0-9a-f]+, locked as"):
        set_image(place)


def test_a_missing_or_linked_or_short_file_makes_no_image(
    place: LockedFolder, tmp_path: Path
) -> None:
    path = place.root / "model-1.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(WeightsDamaged, match="became shorter"):
        set_image(place)
    path.unlink()
    with pytest.raises(WeightsDamaged, match="is missing"):
        set_image(place)
    (tmp_path / "other").write_bytes(whole)
    path.symlink_to(tmp_path / "other")
    with pytest.raises(WeightsDamaged, match="cannot be opened as a plain file"):
        set_image(place)


def test_a_file_that_changes_after_it_was_read_is_found_when_the_registry_objects(
    place: LockedFolder,
) -> None:
    layer = layers_of(place)[1]
    layer.require_whole()
    _flip(place.root / "model-1.safetensors")
    with pytest.raises(StoreDamaged, match="was changed since it was read"):
        layer.require_whole()


def test_a_set_goes_to_a_registry_and_comes_back_whole(
    place: LockedFolder, sm120: Command, door: Door, tmp_path: Path
) -> None:
    at = f"{door.host_port}/weights/tiny"
    named = sm120("weights", "image", place.root, "--json").json
    rehearsed = sm120("weights", "image", place.root, at, "--dry-run")
    assert "would be sent" in rehearsed.out
    done = sm120("weights", "image", place.root, f"{at}:v1", "--json").json
    assert done["digest"] == named["digest"]
    assert done["sent_bytes"] >= done["bytes"] >= sum(map(len, ALL.values()))
    again = sm120("weights", "image", place.root, f"{at}:v1", "--json").json
    assert again["sent_bytes"] == 0
    pulled = sm120("registry", "pull", f"{at}:v1", tmp_path / "out", "--platform", "linux/arm64")
    assert pulled.code == 0, pulled.err
    found = {}
    for path in (tmp_path / "out" / "blobs" / "sha256").iterdir():
        if not tarfile.is_tarfile(path):
            continue
        with tarfile.open(path) as tar:
            for member in (m for m in tar if m.isfile()):
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    assert found == ALL


def test_a_damaged_set_is_not_sent(place: LockedFolder, sm120: Command, door: Door) -> None:
    _flip(place.root / "model-1.safetensors")
    ended = sm120("weights", "image", place.root, f"{door.host_port}/weights/tiny:v1")
    assert (ended.error, ended.code) == ("WeightsDamaged", 60)
    assert not door.asked


def test_a_digest_that_is_not_the_sets_is_refused(
    place: LockedFolder, sm120: Command, door: Door
) -> None:
    wrong = f"{door.host_port}/weights/tiny@sha256:{'a' * 64}"
    ended = sm120("weights", "image", place.root, wrong)
    assert ended.error == "ReferenceInvalid"
    assert "the image is sha256:" in ended.err
