from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.oci.record import LayerRecord, WrittenLayer
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import LockEdited, LockMissing, LockStale, SpecInvalid
from pipeline.images.assemble import plan as plans
from pipeline.images.assemble.plan import ImagePlan, LayerKind, LayerPlan, plan_image, work_for
from pipeline.images.assemble.venv import Venv
from pipeline.images.lock.model import DebPin, WheelPin
from pipeline.images.spec.image import Account
from tests.makers import (
    AMD64,
    Edit,
    Image,
    make_checkout,
    make_deb,
    make_wheel,
    patch_files,
    root_image,
    wheel_image,
)


def pin(name: str, size: int = 1, letter: str = "a", version: str = "1.0") -> WheelPin:
    file = f"{name}-{version}-py3-none-any.whl"
    return WheelPin(name=name, version=version, file=file, size_bytes=size, sha256=letter * 64)


def deb(name: str, letter: str = "a") -> DebPin:
    path = f"pool/{name}_1_amd64.deb"
    return DebPin(name=name, version="1", path=path, size_bytes=1, sha256=letter * 64)


WHEELS = LayerPlan("title", LayerKind.WHEELS, "amd64", (pin("a"), pin("b")))
DEBS = LayerPlan("title", LayerKind.ROOT, "amd64", (deb("a"),))
USER = Account(name="engine", uid=1000, gid=1000, home="/home/engine")


@pytest.mark.parametrize(
    "change",
    [
        {"pins": (pin("a"),)},
        {"pins": (pin("a"), pin("b", letter="c"))},
        {"pins": (pin("a"), pin("b", version="2.0"))},
        {"pins": (pin("b"), pin("a"))},
        {"venv": Venv(version="3.12")},
        {"venv": Venv(root="opt/other")},
        {"prefer": ("a",)},
        {"rewrite_record": ("a",)},
        {"kind": LayerKind.DEBS},
    ],
)
def test_what_decides_a_layers_bytes_is_in_its_key(change: dict[str, Any]) -> None:
    assert replace(WHEELS, **change).key != WHEELS.key


@pytest.mark.parametrize("change", [{"title": "other"}, {"architecture": "arm64"}])
def test_what_does_not_decide_the_bytes_of_wheels_is_not(change: dict[str, Any]) -> None:
    assert replace(WHEELS, **change).key == WHEELS.key


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "arm64"},
        {"accounts": (USER,)},
        {"accounts": (USER.model_copy(update={"uid": 7}),)},
        {"kind": LayerKind.DEBS},
        {"pins": (deb("a", "b"),)},
    ],
)
def test_a_debian_layers_key_knows_its_machine_and_accounts(change: dict[str, Any]) -> None:
    assert replace(DEBS, **change).key != DEBS.key


def test_the_format_is_in_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = WHEELS.key
    monkeypatch.setattr(plans, "FORMAT", 2)
    assert WHEELS.key != before


def test_a_files_place_on_a_mirror_does_not_matter() -> None:
    moved = deb("a").model_copy(update={"path": "pool/other/a_1_amd64.deb"})
    assert replace(DEBS, pins=(moved,)).key == DEBS.key


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """Wheels count as big from 2 kB on."""
    monkeypatch.setattr(plans, "BIG_WHEEL_BYTES", 2000)
    return 2000


MODULE = b"one\ntwo\nthree\n"
EDIT = Edit("pkg/mod.py", MODULE, b"one\nzwei\nthree\n")


def images(tmp_path: Path, **more: Any) -> list[Image]:
    mirror = tmp_path / "mirror"
    wheels = [make_wheel(mirror, "pkg", {"pkg/mod.py": MODULE}), make_wheel(mirror, "big", noise())]
    child = wheel_image("child", wheels, patches="patches/series.yaml", **more)
    child.files = {**patch_files(EDIT), "run.sh": "#!/bin/sh\n"}
    child.spec["files"] = [{"from": "run.sh", "to": "/opt/run.sh"}]
    return [root_image([make_deb(mirror, "tool")]), child]


def noise() -> dict[str, bytes]:
    return {"big/data": random.Random(3).randbytes(4000)}


def planned(tmp_path: Path, *given: Image, name: str = "child") -> ImagePlan:
    return plan_image(make_checkout(tmp_path / "checkout", *given), name, AMD64)


def test_a_big_wheel_has_a_layer_of_its_own(tmp_path: Path, small_limit: int) -> None:
    plan = planned(tmp_path, *images(tmp_path))
    assert [layer.title for layer in plan.all_layers()] == [
        "1 Debian packages",
        "big 1.0",
        "1 small wheels",
    ]
    assert all(p.size_bytes >= small_limit for p in plan.layers[0].pins)


def test_small_wheels_share_one_layer(tmp_path: Path) -> None:
    plan = planned(tmp_path, *images(tmp_path))
    assert [len(layer.pins) for layer in plan.layers] == [2]


def test_only_wheels_of_the_layer_are_preferred_in_it(tmp_path: Path, small_limit: int) -> None:
    python = {"prefer": ["big", "pkg", "other"], "rewrite_record": {"big": "it lies"}}
    big, small = planned(tmp_path, *images(tmp_path, python=python)).layers
    assert (big.prefer, big.rewrite_record) == ((), ("big",))
    assert (small.prefer, small.rewrite_record) == (("pkg",), ())
    python = {"rewrite_record": {"pkg": "it lies"}}
    big, small = planned(tmp_path / "other", *images(tmp_path, python=python)).layers
    assert (big.rewrite_record, small.rewrite_record) == ((), ("pkg",))


def test_two_images_plan_the_same_layer_for_the_same_wheel(
    tmp_path: Path, small_limit: int
) -> None:
    root, one = images(tmp_path)
    two = wheel_image("two", one.wheels[1:], env={"A": "1"})
    checkout = make_checkout(tmp_path / "checkout", root, one, two)
    keys = [{x.key for x in plan_image(checkout, n, AMD64).layers} for n in ("child", "two")]
    assert len(keys[0] & keys[1]) == 1


def edit_spec(child: Image) -> None:
    child.spec["env"] = {"A": "1"}


def edit_file(child: Image) -> None:
    child.files["run.sh"] += "true\n"


def edit_patch(child: Image) -> None:
    child.files["patches/0001.patch"] += "\n"


def edit_series(child: Image) -> None:
    child.files["patches/series.yaml"] = child.files["patches/series.yaml"].replace(
        "some-gate", "other-gate"
    )


def drop_a_wheel(child: Image) -> None:
    child.wheels = child.wheels[:1]


@pytest.mark.parametrize("change", [edit_spec, edit_file, edit_patch, edit_series, drop_a_wheel])
def test_what_decides_an_image_is_in_its_key(
    tmp_path: Path, change: Callable[[Image], None]
) -> None:
    root, child = images(tmp_path)
    before = planned(tmp_path, root, child)
    change(child)
    after = planned(tmp_path, root, child)
    assert after.key != before.key
    if change is not drop_a_wheel:
        assert [x.key for x in after.all_layers()] == [x.key for x in before.all_layers()]


def test_a_changed_base_changes_the_key(tmp_path: Path) -> None:
    root, child = images(tmp_path)
    before = planned(tmp_path, root, child)
    root.spec["env"] = {"B": "1"}
    assert planned(tmp_path, root, child).key != before.key


def test_another_folder_and_other_times_change_nothing(tmp_path: Path) -> None:
    one = planned(tmp_path / "one", *images(tmp_path / "one"))
    two = planned(tmp_path / "two", *images(tmp_path / "two"))
    assert (one.key, [x.key for x in one.all_layers()]) == (
        two.key,
        [x.key for x in two.all_layers()],
    )


def test_a_file_that_no_spec_names_changes_nothing(tmp_path: Path) -> None:
    root, child = images(tmp_path)
    before = planned(tmp_path, root, child)
    child.files["notes.txt"] = "for people\n"
    assert planned(tmp_path, root, child).key == before.key


def test_a_hundred_layers_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, child = images(tmp_path)
    monkeypatch.setattr(plans, "BIG_WHEEL_BYTES", 1)
    monkeypatch.setattr(plans, "MOST_LAYERS", 4)
    assert len(planned(tmp_path, root, child).all_layers()) == 3
    monkeypatch.setattr(plans, "MOST_LAYERS", 3)
    with pytest.raises(SpecInvalid, match="child: has 3 layers, at most 2"):
        planned(tmp_path, root, child)


def test_the_limit_is_one_that_engines_can_take() -> None:
    assert plans.MOST_LAYERS <= 100


def test_an_image_without_a_lock_is_refused(tmp_path: Path) -> None:
    root, child = images(tmp_path)
    checkout = make_checkout(tmp_path / "checkout", root, child)
    checkout.lock_path("child", AMD64).unlink()
    with pytest.raises(LockMissing):
        plan_image(checkout, "child", AMD64)


def test_a_lock_of_an_older_spec_is_refused(tmp_path: Path) -> None:
    root, child = images(tmp_path)
    checkout = make_checkout(tmp_path / "checkout", root, child)
    path = checkout.folder("child") / "image.yaml"
    path.write_text(path.read_text().replace("pkg==1.0", "pkg==1.1"))
    with pytest.raises(LockStale):
        plan_image(checkout, "child", AMD64)


def test_a_lock_on_an_older_base_is_refused(tmp_path: Path) -> None:
    root, child = images(tmp_path)
    make_checkout(tmp_path / "checkout", root, child)
    root.debs = [make_deb(tmp_path / "mirror", "other")]
    checkout = make_checkout(tmp_path / "checkout", root)
    with pytest.raises(LockStale, match="its base root"):
        plan_image(checkout, "child", AMD64)


def test_an_edited_lock_is_refused(tmp_path: Path) -> None:
    root, child = images(tmp_path)
    checkout = make_checkout(tmp_path / "checkout", root, child)
    path = checkout.lock_path("child", AMD64)
    path.write_text(path.read_text().replace('"version": "1.0"', '"version": "1.1"'))
    with pytest.raises(LockEdited):
        plan_image(checkout, "child", AMD64)


def test_work_names_what_is_missing_and_what_must_be_fetched(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    plan = planned(tmp_path, *images(tmp_path))
    work = work_for([plan, plan], store)
    assert (len(work.missing), len(work.cached), len(work.fetch)) == (2, 0, 3)
    assert work.disk_bytes > work.fetch_bytes > 0


def test_a_file_that_is_there_with_its_size_is_not_fetched(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    root, child = images(tmp_path)
    plan = planned(tmp_path, root, child)
    wheel = child.wheels[0]
    first = next(p for p in plan.lock.wheels if p.file == wheel.name)
    store.input_path(first.sha256).write_bytes(wheel.read_bytes())
    assert first not in work_for([plan], store).fetch
    store.input_path(first.sha256).write_bytes(b"half")
    assert first in work_for([plan], store).fetch


def test_a_layer_that_is_there_needs_no_files(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    plan = planned(tmp_path, *images(tmp_path))
    layer = plan.layers[0]
    digest = store.put_blob(b"layer")
    record = LayerRecord(digest=digest, diff_id=digest, size_bytes=5, unpacked_bytes=9)
    store.keep_layer(layer.key, WrittenLayer(record, []))
    work = work_for([plan], store)
    assert work.cached == (layer,)
    assert not set(layer.pins) & set(work.fetch)
