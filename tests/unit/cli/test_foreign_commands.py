"""A foreign base from spec to image, by the command alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.images.lock.model import BasePin, read_lock
from pipeline.images.spec.checkout import Checkout
from tests.testbed.foreign_image import (
    REPOSITORY,
    ForeignImage,
    Thing,
    foreign_image,
    index_of,
    layer_of,
    put_index,
    system_layer,
)
from tests.testbed.oci_door import Door
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.support import AMD64, Command, write_spec


@pytest.fixture
def image(tiny: TinyRegistry) -> ForeignImage:
    image = foreign_image(system_layer(), layer_of(Thing("etc/more", b"more")))
    image.put(tiny)
    return image


@pytest.fixture
def checkout(tmp_path: Path, tiny: TinyRegistry, image: ForeignImage) -> Checkout:
    """One spec on an index of that image, not locked yet."""
    (tmp_path / "lockfiles").mkdir()
    checkout = Checkout(tmp_path)
    digest = put_index(tiny, index_of((image, "linux/amd64")))
    write_spec(
        checkout,
        {
            "name": "mine",
            "summary": "a file of ours on a foreign base",
            "base": f"{REPOSITORY}:v1@{digest}",
            "platforms": [AMD64],
            "files": [{"from": "tool", "to": "/opt/tool"}],
        },
    )
    (checkout.folder("mine") / "tool").write_text("new\n")
    return checkout


@pytest.fixture
def at_door(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_BASE_REGISTRIES", door.host_port)


def test_lock_plan_build_explain(
    sm120: Command, checkout: Checkout, image: ForeignImage, door: Door
) -> None:
    place = ("--base-registry", door.host_port)
    done = sm120("image", "lock", "mine", *place)
    assert done.code == 0, done.err
    assert f"base  {REPOSITORY}" in done.out
    text = checkout.lock_path("mine", AMD64).read_text()
    assert door.host_port not in text
    assert [str(layer.digest) in text for layer in _pin(checkout).layers] == [True, True]
    assert sm120("plan", "mine").out.count("to fetch") == 2
    built = sm120("build", "mine", "--accept", "--json", *place)
    assert [x["title"] for x in built.json[0]["layers"]] == [
        *("base layer 1", "base layer 2", "mine files")
    ]
    explained = sm120("image", "explain", "mine", "/etc/more")
    assert f"from   the base image {REPOSITORY}@{image.digest}" in explained.out
    listed = {
        row["path"]: row["layer"] for row in sm120("image", "files", "mine", "etc", "--json").json
    }
    assert listed["/etc/more"] == "base layer 2"
    assert sm120("image", "cat", "mine", "/etc/more").error == "UnknownFile"
    assert sm120("image", "lock", "mine", *place).out == "locked; nothing changed\n"


def _pin(checkout: Checkout) -> BasePin:
    pin = read_lock(checkout.lock_path("mine", AMD64)).base_image
    assert pin is not None
    return pin


@pytest.mark.usefixtures("at_door")
def test_the_registry_may_come_from_the_environment(
    sm120: Command, checkout: Checkout, door: Door
) -> None:
    assert sm120("image", "lock", "mine").code == 0
    assert sm120("build", "mine", "--accept").code == 0
    assert f"base registries: {door.host_port}" in sm120("image", "sources").out


def test_without_a_registry_the_error_says_how_to_name_one(
    sm120: Command, checkout: Checkout
) -> None:
    done = sm120("image", "lock", "mine")
    assert done.error == "BaseUnplaced"
    assert "--base-registry" in done.err
    assert not checkout.lock_path("mine", AMD64).exists()


@pytest.mark.usefixtures("at_door")
def test_offline_is_one_error_where_the_store_is_empty(sm120: Command, checkout: Checkout) -> None:
    sm120("image", "lock", "mine")
    done = sm120("build", "mine", "--accept", "--offline")
    assert done.error == "OfflineMiss"
    assert "this part of the base image is not in the store" in done.err


@pytest.mark.usefixtures("at_door")
def test_a_collected_folder_builds_the_same_image_without_network(
    sm120: Command, checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Door
) -> None:
    sm120("image", "lock", "mine")
    first = sm120("build", "mine", "--accept", "--json").json[0]["digest"]
    assert sm120("image", "collect", "mine", "--output", tmp_path / "usb").code == 0
    monkeypatch.delenv("SM120_BASE_REGISTRIES")
    before = len(door.asked)
    store = ("--store", tmp_path / "other")
    args = ("build", "mine", "--offline", "--mirror", tmp_path / "usb", "--json")
    assert sm120(*store, *args).json[0]["digest"] == first
    assert len(door.asked) == before


@pytest.mark.usefixtures("at_door")
def test_a_rebuild_needs_no_registry_for_its_base(
    sm120: Command, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm120("image", "lock", "mine")
    sm120("build", "mine", "--accept")
    monkeypatch.delenv("SM120_BASE_REGISTRIES")
    done = sm120("image", "rebuild", "mine", "--offline")
    assert (done.code, "identical" in done.out) == (0, True), done.err


@pytest.mark.usefixtures("at_door")
def test_gates_do_not_judge_what_they_cannot_read(sm120: Command, checkout: Checkout) -> None:
    sm120("image", "lock", "mine")
    sm120("build", "mine", "--accept")
    done = sm120("gate", "run", "mine", "--only", "arch", "--arch", "sm_120")
    assert done.error == "GateUnknown", done.err
    assert "foreign base" in done.err


@pytest.mark.usefixtures("at_door")
def test_the_store_can_be_looked_after(sm120: Command, checkout: Checkout) -> None:
    sm120("image", "lock", "mine")
    sm120("build", "mine", "--accept")
    assert sm120("store", "check").code == 0
    assert sm120("store", "trim", "--yes").code == 0
    assert sm120("image", "explain", "mine", "/etc/more").code == 0


@pytest.mark.usefixtures("at_door")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"base": f"{REPOSITORY}:v1"}, "SpecInvalid", "no digest is given"),
        ({"base": f"r.example/{REPOSITORY}@sha256:{'0' * 64}"}, "SpecInvalid", "names a registry"),
        ({"base": f"{REPOSITORY}@sha256:{'0' * 64}"}, "NotInRegistry", "holds no sha256"),
        ({"debs": ["curl"]}, "SpecInvalid", "debs: cannot be added to a foreign base"),
        ({"gates": ["arch"]}, "SpecInvalid", "gates: cannot judge an image on a foreign base"),
        ({"platforms": ["linux/arm64"]}, "NotInRegistry", "has 0 images for linux/arm64"),
        ({"debian": {}}, "SpecInvalid", "either `base`"),
    ],
)
def test_a_spec_that_cannot_be_locked_says_why(
    sm120: Command, checkout: Checkout, change: dict[str, object], error: str, message: str
) -> None:
    path = checkout.folder("mine") / "image.yaml"
    write_spec(checkout, {**yaml.safe_load(path.read_text()), **change})
    done = sm120("image", "lock", "mine")
    assert done.error == error, done.err
    assert message in done.err
    assert len(done.err.strip().splitlines()) <= 4
