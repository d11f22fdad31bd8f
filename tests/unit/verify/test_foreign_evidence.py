"""What is said of a foreign base: its digest, its layers, and that the rest is not known."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.keys import make_private_key
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import UnknownFile
from pipeline.evidence.statements.evidence_set import NAME as SET
from pipeline.evidence.statements.image import image_statements
from pipeline.evidence.statements.inventory import file_origin
from pipeline.evidence.verify.verdict import Node, Verdict, show
from tests.makers import AMD64, Image, build, make_checkout, make_wheel
from tests.testbed.foreign_image import (
    REPOSITORY,
    Thing,
    folder,
    foreign_image,
    index_of,
    layer_of,
    link,
    system_layer,
)
from tests.testbed.tiny_registry import digest_of
from tests.unit.assemble.test_on_a_foreign_base import spec_on
from tests.unit.verify.world import WHEN, World, reasons, texts, trusted

IMAGE = foreign_image(
    system_layer(
        folder("var"),
        folder("var/cache"),
        Thing("var/cache/old", b"x"),
        Thing("etc/gone", b"x"),
        link("etc/alias", "passwd"),
    ),
    layer_of(Thing("etc/.wh.gone"), Thing("var/cache/.wh..wh..opq"), Thing("var/cache/new", b"y")),
)
INDEX = index_of((IMAGE, "linux/amd64"))
NAME = f"{REPOSITORY}@{IMAGE.digest}"


def make_foreign_world(place: Path) -> World:
    from pipeline.images.fetch.base import Bases
    from pipeline.images.fetch.base_settings import BaseSettings
    from pipeline.images.spec.image import ForeignBase

    mirror = place / "mirror"
    IMAGE.write(mirror)
    blobs = mirror / "blobs" / "sha256"
    (blobs / digest_of(INDEX).removeprefix("sha256:")).write_bytes(INDEX)
    store = open_store(place / "store")
    base = ForeignBase(repository=REPOSITORY, digest=digest_of(INDEX))
    pin = Bases(store, BaseSettings(folders=(mirror,))).resolve(base, AMD64)
    wheel = make_wheel(mirror, "pkg")
    # one file of ours in two places is one material
    files = [{"from": "tool", "to": to} for to in ("/opt/tool", "/usr/bin/tool2")]
    python = {"requirements": ["pkg==1.0"]}
    spec = spec_on(IMAGE, base=str(base), python=python, files=files)
    mine = Image(spec, [wheel], files={"tool": "new\n"}, base_image=pin)
    checkout = make_checkout(place / "checkout", mine)
    built = build(checkout, store, mirror, "mine")[0]
    statements = image_statements(checkout, store, built, WHEN, spdx=True)
    return World(
        place, checkout, store, built, make_private_key(), make_private_key(), copy.copy(statements)
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_foreign_world(tmp_path_factory.mktemp("world"))


def vouching(world: World, digest: str = IMAGE.digest) -> Trust:
    body = {"keys": [trusted(world.key)], "bases": {digest: "read and scanned by us"}}
    return Trust.model_validate(body)


def test_a_base_that_nobody_vouches_for_is_incomplete_never_valid(world: World) -> None:
    node = world.walk().node
    assert node.verdict is Verdict.INCOMPLETE
    assert node.culprit().title == "contents"
    assert f"base image {NAME}" in show(node)


@pytest.mark.parametrize("digest", [IMAGE.digest, digest_of(INDEX)])
def test_a_base_that_the_trust_file_takes_as_published_is_valid(world: World, digest: str) -> None:
    node = world.walk(trust=vouching(world, digest)).node
    assert node.verdict is Verdict.VALID, show(node)
    said = texts(node.every())
    contents = "contents: accepted as published: read and scanned by us"
    assert said[said.index("locked") - 1 : said.index("locked") + 5] == [
        "base image team/base@…: its 2 layers at the bottom, unchanged",
        "locked",
        contents,
        "1 wheel: locked, and in a layer of this image",
        "pkg-1.0-py3-none-any.whl",
        "0 Debian packages",
    ]
    rest = "1 package and a base image whose contents are not listed"
    assert said.count(f"bill of materials: {rest}, the same as in the provenance") == 2


def test_vouching_for_another_base_does_not_help(world: World) -> None:
    trust = vouching(world, digest_of(b"another"))
    assert world.walk(trust=trust).node.verdict is Verdict.INCOMPLETE


def test_without_a_checkout_the_base_is_still_walked_to(world: World) -> None:
    node = world.walk(trust=vouching(world), checkout=None).node
    assert node.verdict is Verdict.VALID
    assert "locked  valid: as stated; a checkout of this image has the lock" in show(node)
    assert f"base image {NAME}" in show(node)


Lie = Callable[[dict[str, Any]], None]


def dependencies(body: dict[str, Any]) -> list[dict[str, Any]]:
    resources: list[dict[str, Any]] = body["predicate"]["buildDefinition"]["resolvedDependencies"]
    return resources


def leave_out(body: dict[str, Any]) -> None:
    del dependencies(body)[0]


def another_digest(body: dict[str, Any]) -> None:
    dependencies(body)[0]["digest"]["sha256"] = "0" * 64


def another_index(body: dict[str, Any]) -> None:
    dependencies(body)[0]["annotations"]["index"] = "sha256:" + "0" * 64


def another_name(body: dict[str, Any]) -> None:
    dependencies(body)[0]["name"] = "team/other"


def fewer_layers(body: dict[str, Any]) -> None:
    dependencies(body)[0]["annotations"]["layers"] = []


def other_layers(body: dict[str, Any]) -> None:
    dependencies(body)[0]["annotations"]["layers"].reverse()


def only_the_first_layer(body: dict[str, Any]) -> None:
    dependencies(body)[0]["annotations"]["layers"].pop()


def another_config(body: dict[str, Any]) -> None:
    dependencies(body)[0]["annotations"]["config"] = "sha256:" + "0" * 64


def two_bases(body: dict[str, Any]) -> None:
    other = copy.deepcopy(dependencies(body)[0])
    other["uri"] = "pkg:oci/other@1"
    dependencies(body).append(other)


def no_digest(body: dict[str, Any]) -> None:
    del dependencies(body)[0]["digest"]


def spec_another(body: dict[str, Any]) -> None:
    external = body["predicate"]["buildDefinition"]["externalParameters"]
    external["images"]["mine"]["spec"]["base"] = f"{REPOSITORY}@sha256:{'0' * 64}"


def spec_none(body: dict[str, Any]) -> None:
    external = body["predicate"]["buildDefinition"]["externalParameters"]
    external["images"]["mine"]["spec"]["base"] = "root"


def walk_with(world: World, name: str, lie: Lie) -> Node:
    """The set lists the lie, too: nothing else may tell of it."""
    kept = {key: e for key, e in world.envelopes().items() if key != SET}
    return world.walk({**kept, name: world.lie(name, lie)}, trust=vouching(world)).node


BASE, NOT_LOWEST = "base image team/base@…: ", "its layers are not at the bottom of this image"
UNLOCKED = "locked: differs from the lock that the provenance names"
SPEC_CHANGED = "images/mine/image.yaml: has changed since: base"
LIES: dict[Lie, list[str]] = {
    leave_out: ["base image: 1 in the specs, 0 recorded"],
    another_digest: [
        UNLOCKED,
        "contents: unknown; a trust file can accept this digest under `bases`",
    ],
    another_index: [f"{BASE}the spec names …"],
    another_name: [f"{BASE}is recorded as team/other of mine"],
    fewer_layers: [f"{BASE}{NOT_LOWEST}"],
    other_layers: [f"{BASE}{NOT_LOWEST}"],
    only_the_first_layer: [UNLOCKED],
    another_config: [UNLOCKED],
    two_bases: ["base image: 1 in the specs, 2 recorded"],
    no_digest: [
        "predicate: provenance: pkg:oci/base@sha256%3A…?arch=amd64: has no digest",
        "provenance: no statement names what it was made of",
    ],
    spec_another: [SPEC_CHANGED, f"{BASE}the spec names …"],
    spec_none: [SPEC_CHANGED, "base image: 0 in the specs, 1 recorded"],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_the_base_is_found(world: World, lie: Lie) -> None:
    node = walk_with(world, "provenance", lie)
    assert node.verdict is Verdict.BROKEN, show(node)
    assert reasons(node) == LIES[lie]


def without_base(body: dict[str, Any]) -> None:
    body["predicate"]["components"] = body["predicate"]["components"][1:]


def complete(body: dict[str, Any]) -> None:
    body["predicate"]["compositions"] = [{"aggregate": "complete", "assemblies": []}]


def other_hash(body: dict[str, Any]) -> None:
    body["predicate"]["components"][0]["hashes"][0]["content"] = "0" * 64


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (without_base, "leaves out pkg:oci/base@"),
        (complete, "claims to be complete, but contains a base image"),
        (other_hash, "lists pkg:oci/base@"),
    ],
)
def test_a_bill_that_hides_the_base_or_calls_itself_complete_is_broken(
    world: World, lie: Lie, why: str
) -> None:
    node = walk_with(world, "sbom-cyclonedx", lie)
    assert node.verdict is Verdict.BROKEN
    assert node.culprit().message.startswith(why)


def test_an_SPDX_bill_without_the_base_is_broken(world: World) -> None:
    def hide(body: dict[str, Any]) -> None:
        kept = [p for p in body["predicate"]["packages"] if "BaseImage" not in p["SPDXID"]]
        body["predicate"]["packages"] = kept

    node = walk_with(world, "sbom-spdx", hide)
    assert node.verdict is Verdict.BROKEN
    assert node.culprit().message.startswith("leaves out pkg:oci/base@")


def test_another_base_in_the_lock_makes_the_evidence_stale(world: World, tmp_path: Path) -> None:
    checkout = world.checkout_copy(tmp_path)
    path = checkout.folder("mine") / "image.yaml"
    spec = json.loads(path.read_text())
    other = world.built.plan.lock.base_image
    assert other is not None
    other = other.model_copy(update={"repository": "team/moved"})
    spec["base"] = f"team/moved@{digest_of(INDEX)}"
    make_checkout(checkout.root, Image(spec, files={"tool": "new\n"}, base_image=other))
    node = world.walk(trust=vouching(world), checkout=checkout).node
    assert node.verdict is Verdict.STALE, show(node)
    moved = ["mine: was …, is …", "pkg-1.0-py3-none-any.whl: is no longer locked"]
    assert reasons(node) == [SPEC_CHANGED, *moved]
    # the same name, but other bytes under it
    config = other.config.model_copy(update={"digest": f"sha256:{'0' * 64}"})
    newer = other.model_copy(update={"repository": REPOSITORY, "config": config})
    spec["base"] = f"{REPOSITORY}@{digest_of(INDEX)}"
    make_checkout(checkout.root, Image(spec, files={"tool": "new\n"}, base_image=newer))
    node = world.walk(trust=vouching(world), checkout=checkout).node
    assert reasons(node) == [moved[0], "locked: another base is locked now", moved[1]]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/usr/bin/tool", "/usr/bin/tool"),
        ("/bin/tool", "/usr/bin/tool"),
        ("etc/alias", "/etc/passwd"),
        ("/var/cache/new", "/var/cache/new"),
        ("/home/app", "/home/app"),
    ],
)
def test_a_file_of_the_base_is_explained_as_such(world: World, path: str, shown: str) -> None:
    file = file_origin(world.checkout, world.store, world.built, path)
    assert file.path == shown
    assert file.origin == f"the base image {NAME}"
    assert file.package is None
    assert file.layer_digest in [digest_of(x.blob) for x in IMAGE.layers]


@pytest.mark.parametrize("path", ["/etc/gone", "/var/cache/old", "/etc/.wh.gone"])
def test_a_file_that_the_base_took_away_is_not_there(world: World, path: str) -> None:
    with pytest.raises(UnknownFile, match="no such file"):
        file_origin(world.checkout, world.store, world.built, path)


def test_files_on_top_are_still_ours(world: World) -> None:
    file = file_origin(world.checkout, world.store, world.built, "/opt/tool")
    assert file.origin == "a file of images/mine"
    wheel = "opt/venv/lib/python3.11/site-packages/pkg/__init__.py"
    assert file_origin(world.checkout, world.store, world.built, wheel).origin == "pkg"
