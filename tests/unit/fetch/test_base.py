"""Foreign bases from registries: by digest, for one platform, whole or not at all."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import (
    BaseUnplaced,
    BaseUnusable,
    NotInRegistry,
    ReferenceInvalid,
    RegistryBroken,
    RegistryRefused,
    RegistryUnreachable,
    SourceUnreachable,
)
from pipeline.images.fetch.base import Bases
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.lock.model import BasePin
from pipeline.images.spec.image import ForeignBase
from tests.testbed.foreign_image import (
    OCI,
    REPOSITORY,
    ForeignImage,
    Layer,
    Thing,
    foreign_image,
    gzipped,
    index_of,
    layer_of,
    put_index,
    system_layer,
    tar_of,
)
from tests.testbed.oci_door import Door, cut_answer, status, with_body
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.registry.support import keep_login
from tests.unit.support import AMD64, ARM64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def bases_at(store: Store, *places: str) -> Bases:
    return Bases(store, BaseSettings(registries=places, access=Access(first_wait_s=0.001)))


def asked(digest: str) -> ForeignBase:
    return ForeignBase(repository=REPOSITORY, digest=digest)


def locked(
    store: Store, door: Door, tiny: TinyRegistry, image: ForeignImage, platform: str = AMD64
) -> BasePin:
    image.put(tiny)
    return bases_at(store, door.host_port).resolve(asked(image.digest), platform)


def test_a_lock_records_every_part_by_digest_and_size(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    image = foreign_image(system_layer(), layer_of(Thing("a", b"a")))
    pin = locked(store, door, tiny, image)
    assert pin.manifest.digest == pin.asked == image.digest
    assert pin.index is None
    assert (pin.config.digest, pin.config.size_bytes) == (
        digest_of(image.config),
        len(image.config),
    )
    assert [(x.digest, x.size_bytes, x.diff_id) for x in pin.layers] == [
        (digest_of(x.blob), len(x.blob), x.diff_id) for x in image.layers
    ]
    assert door.count("GET", "/blobs/") == 1, "a lock reads the config alone"
    assert door.host_port not in pin.model_dump_json()


@pytest.mark.parametrize(("platform", "which"), [(AMD64, 0), (ARM64, 1)])
@pytest.mark.parametrize("arm", ["linux/arm64", "linux/arm64/v8"])
def test_of_an_index_the_image_of_the_platform_is_taken(
    store: Store, door: Door, tiny: TinyRegistry, platform: str, which: int, arm: str
) -> None:
    images = [foreign_image(), foreign_image(architecture="arm64")]
    for image in images:
        image.put(tiny)
    notes = foreign_image(architecture="unknown", os="unknown")
    parts = [(images[0], "linux/amd64"), (images[1], arm), (notes, "unknown/unknown")]
    digest = put_index(tiny, index_of(*parts))
    pin = bases_at(store, door.host_port).resolve(asked(digest), platform)
    assert pin.index is not None
    assert pin.index.digest == pin.asked == digest
    assert pin.manifest.digest == images[which].digest


@pytest.mark.parametrize(
    "platforms",
    [[], ["linux/arm64"], ["linux/amd64", "linux/amd64"], ["linux/amd64/v3"]],
    ids=["none", "another", "two", "a variant"],
)
def test_an_index_without_exactly_one_image_for_the_platform_is_refused(
    store: Store, door: Door, tiny: TinyRegistry, platforms: list[str]
) -> None:
    image = foreign_image()
    image.put(tiny)
    digest = put_index(tiny, index_of(*((image, p) for p in platforms)))
    with pytest.raises(NotInRegistry, match=r"has \d images for linux/amd64"):
        bases_at(store, door.host_port).resolve(asked(digest), AMD64)


def test_an_index_that_lies_about_the_platform_is_refused(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    image = foreign_image(architecture="arm64")
    image.put(tiny)
    digest = put_index(tiny, index_of((image, "linux/amd64")))
    with pytest.raises(BaseUnusable, match="is for linux/arm64, not for linux/amd64"):
        bases_at(store, door.host_port).resolve(asked(digest), AMD64)


def test_an_index_in_an_index_is_refused(store: Store, door: Door, tiny: TinyRegistry) -> None:
    image = foreign_image()
    image.put(tiny)
    inner = index_of((image, "linux/amd64"))
    put_index(tiny, inner)
    entry = {
        "mediaType": f"{OCI}.index.v1+json",
        "digest": digest_of(inner),
        "size": len(inner),
        "platform": {"os": "linux", "architecture": "amd64"},
    }
    outer = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with pytest.raises(BaseUnusable, match="does not match its index"):
        bases_at(store, door.host_port).resolve(asked(put_index(tiny, outer)), AMD64)


@pytest.mark.parametrize(
    "changes",
    [{"os": "windows"}, {"architecture": "arm64"}, {"os": "linux\nx"}],
)
def test_an_image_for_another_platform_is_refused(
    store: Store, door: Door, tiny: TinyRegistry, changes: dict[str, Any]
) -> None:
    with pytest.raises(BaseUnusable, match="not for linux/amd64"):
        locked(store, door, tiny, foreign_image(**changes))


def test_more_layers_than_can_be_mounted_are_refused(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    layer = layer_of(Thing("a"))
    with pytest.raises(BaseUnusable, match="128 layers, at most 127"):
        locked(store, door, tiny, foreign_image(*[layer] * 128))


def test_a_login_that_docker_keeps_opens_the_registry(
    store: Store, door: Door, tiny: TinyRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.login = "ann:secret"
    with pytest.raises(RegistryRefused):
        locked(store, door, tiny, foreign_image())
    for word in ("wrong", "secret"):
        auth = base64.b64encode(f"ann:{word}".encode()).decode()
        keep_login(monkeypatch, tmp_path / word, {"auths": {door.host_port: {"auth": auth}}})
        if word == "wrong":
            with pytest.raises(RegistryRefused):
                locked(store, door, tiny, foreign_image())
    bases_at(store, door.host_port).bring(locked(store, door, tiny, foreign_image()))


def typed(kind: str) -> Layer:
    return gzipped(tar_of(Thing("a")), kind)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (typed(f"{OCI}.layer.nondistributable.v1.tar+gzip"), "registries may not distribute"),
        (
            typed("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"),
            "registries may not distribute",
        ),
        (typed(f"{OCI}.layer.nondistributable.v1.tar+zstd"), "registries may not distribute"),
        (typed("application/vnd.oci.image.layer.v1.tar+brotli"), "not supported"),
        (typed("text/html"), "not supported"),
        (Layer(b"", "sha256:" + "0" * 64), "of 0 bytes"),
    ],
)
def test_a_layer_of_an_unsupported_kind_is_refused_when_it_is_locked(
    store: Store, door: Door, tiny: TinyRegistry, layer: Layer, message: str
) -> None:
    with pytest.raises(BaseUnusable, match=message):
        locked(store, door, tiny, foreign_image(system_layer(), layer))


def schema_1(tiny: TinyRegistry) -> str:
    data = json.dumps({"schemaVersion": 1, "name": "x", "fsLayers": [], "history": []}).encode()
    kind = "application/vnd.docker.distribution.manifest.v1+prettyjws"
    tiny.manifests[REPOSITORY, digest_of(data)] = kind, data
    return digest_of(data)


def test_dockers_schema_1_is_refused_by_name(store: Store, door: Door, tiny: TinyRegistry) -> None:
    with pytest.raises(RegistryBroken, match="schema version 1"):
        bases_at(store, door.host_port).resolve(asked(schema_1(tiny)), AMD64)


@pytest.mark.parametrize("kind", ["application/vnd.oci.empty.v1+json", "application/json"])
def test_an_artifact_that_is_no_image_is_refused(
    store: Store, door: Door, tiny: TinyRegistry, kind: str
) -> None:
    data = b"{}"
    config = {"mediaType": kind, "digest": digest_of(data), "size": len(data)}
    with pytest.raises(BaseUnusable, match="is not an image"):
        locked(store, door, tiny, foreign_image(manifest={"config": config}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rootfs": {"type": "layers", "diff_ids": []}}, "rootfs"),
        ({"rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64] * 2}}, "2 in its config"),
        ({"rootfs": {"type": "layers", "diff_ids": ["md5:0"]}}, "rootfs"),
        ({"rootfs": None}, "rootfs"),
        ({"config": []}, "config"),
        ({"history": [{"created_by": 7}]}, "history"),
        ({"history": {}}, "history"),
    ],
)
def test_a_config_that_contradicts_its_layers_is_refused(
    store: Store, door: Door, tiny: TinyRegistry, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(BaseUnusable, match=message):
        locked(store, door, tiny, foreign_image(**config))


@pytest.mark.parametrize(
    "config", [b"no json", b'{"os":"linux","os":"linux"}', b"[" * 90, b"\xff\xfe", b"null"]
)
def test_a_config_that_is_no_sound_JSON_is_refused(
    store: Store, door: Door, tiny: TinyRegistry, config: bytes
) -> None:
    layer = system_layer()
    described = {"mediaType": f"{OCI}.config.v1+json", "digest": digest_of(config)}
    manifest = foreign_image(layer, manifest={"config": {**described, "size": len(config)}})
    with pytest.raises((RegistryBroken, BaseUnusable), match="the config sha256:"):
        locked(
            store,
            door,
            tiny,
            ForeignImage((layer,), config, manifest.manifest),
        )


def test_a_digest_that_is_answered_with_other_bytes_is_refused(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    image, other = foreign_image(), foreign_image(layer_of(Thing("evil")))
    image.put(tiny)
    tiny.manifests[REPOSITORY, image.digest] = other.media_type, other.manifest
    with pytest.raises(RegistryBroken, match=f"asked for {image.digest}"):
        bases_at(store, door.host_port).resolve(asked(image.digest), AMD64)


def test_a_config_that_is_answered_with_other_bytes_is_refused(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    image = foreign_image()
    image.put(tiny)
    tiny.blobs[REPOSITORY, digest_of(image.config)] = b"x" * len(image.config)
    with pytest.raises(RegistryBroken, match="received sha256:"):
        bases_at(store, door.host_port).resolve(asked(image.digest), AMD64)


def test_a_base_is_fetched_once_and_then_nobody_is_asked(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    image = foreign_image(system_layer(), layer_of(Thing("a", b"a")))
    pin = locked(store, door, tiny, image)
    bases = bases_at(store, door.host_port)
    bases.bring(pin)
    for digest, data in image.blobs.items():
        assert store.read_blob(digest) == data
    assert store.read_blob(image.digest) == image.manifest
    before = len(door.asked)
    bases_at(store, door.host_port).bring(pin)
    assert len(door.asked) == before


def test_a_cut_layer_is_gone_on_with(store: Store, door: Door, tiny: TinyRegistry) -> None:
    big = layer_of(Thing("a", bytes(i * 7919 % 251 for i in range(300_000))))
    pin = locked(store, door, tiny, foreign_image(big))
    door.fail("GET", digest_of(big.blob), cut_answer(after=len(big.blob) // 2))
    bases_at(store, door.host_port).bring(pin)
    assert store.read_blob(digest_of(big.blob)) == big.blob
    ranges = [a.headers.get("range") for a in door.asked if digest_of(big.blob) in a.path]
    assert ranges == [None, f"bytes={len(big.blob) // 2}-"]


@pytest.mark.parametrize("body", [b"", b"short", b"x" * 100_000])
def test_a_layer_with_other_bytes_is_not_kept(
    store: Store, door: Door, tiny: TinyRegistry, body: bytes
) -> None:
    image = foreign_image()
    pin = locked(store, door, tiny, image)
    digest = pin.layers[0].digest
    door.fail("GET", digest, with_body(body), times=9)
    with pytest.raises(RegistryBroken):
        bases_at(store, door.host_port).bring(pin)
    assert not store.blob_path(digest).exists()


def test_a_layer_that_the_registry_lost_is_reported(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    pin = locked(store, door, tiny, foreign_image())
    del tiny.blobs[REPOSITORY, pin.layers[0].digest]
    with pytest.raises(NotInRegistry, match=pin.layers[0].digest):
        bases_at(store, door.host_port).bring(pin)


def test_the_next_registry_is_asked_where_the_first_has_it_not(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    image = foreign_image()
    image.put(tiny, f"mirror/{REPOSITORY}")
    bases = bases_at(store, door.host_port, f"{door.host_port}/mirror")
    pin = bases.resolve(asked(image.digest), AMD64)
    bases.bring(pin)
    assert pin.repository == REPOSITORY
    assert store.blob_path(pin.layers[0].digest).exists()


def test_where_no_registry_has_it_all_are_named(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    bases = bases_at(store, door.host_port, f"{door.host_port}/mirror")
    with pytest.raises(SourceUnreachable, match=r"team/base: holds no.*mirror/team/base: holds no"):
        bases.resolve(asked("sha256:" + "0" * 64), AMD64)


def test_a_lie_of_one_registry_is_reported_though_others_are_only_empty(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    image, other = foreign_image(), foreign_image(layer_of(Thing("evil")))
    tiny.manifests[f"a/{REPOSITORY}", image.digest] = other.media_type, other.manifest
    bases = bases_at(store, f"{door.host_port}/a", door.host_port)
    with pytest.raises(RegistryBroken, match="received"):
        bases.resolve(asked(image.digest), AMD64)


def test_a_registry_that_only_fails_is_reported(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    door.fail("GET", "manifests", status(503), times=9)
    with pytest.raises(RegistryUnreachable, match="503"):
        bases_at(store, door.host_port).resolve(asked("sha256:" + "0" * 64), AMD64)


def test_no_registry_at_all_is_an_error_of_its_own(store: Store) -> None:
    with pytest.raises(BaseUnplaced, match="no registry is configured") as error:
        bases_at(store).resolve(asked("sha256:" + "0" * 64), AMD64)
    assert "SM120_BASE_REGISTRIES" in error.value.hint


@pytest.mark.parametrize("place", ["nowhere", "a b.example", "HOST/x", "ok.example:1/Big"])
def test_a_registry_that_is_no_name_is_refused(store: Store, place: str) -> None:
    with pytest.raises(ReferenceInvalid):
        bases_at(store, place).resolve(asked("sha256:" + "0" * 64), AMD64)


def test_a_damaged_document_of_the_store_is_not_believed(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    image = foreign_image()
    pin = locked(store, door, tiny, image)
    bases_at(store, door.host_port).bring(pin)
    store.blob_path(image.digest).write_bytes(foreign_image(os="x").manifest)
    bases_at(store, door.host_port).bring(pin)
    assert store.read_blob(image.digest) == image.manifest
