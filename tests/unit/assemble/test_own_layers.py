from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import PatchConflict, PathConflict, SpecInvalid
from pipeline.core.model import sha256_of
from pipeline.images.assemble.layer import Entry, with_parents, write_layer
from pipeline.images.assemble.own_layers import WheelTree, folders_above, own_entries
from pipeline.images.assemble.patch_series import corrected, patched_entries, refresh_series
from pipeline.images.assemble.plan import ImagePlan, plan_image
from pipeline.images.assemble.venv import Venv, record_row, wheel_entries
from pipeline.images.assemble.wheel import open_wheel
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.new import with_hashes
from tests.makers import (
    AMD64,
    Edit,
    Image,
    make_checkout,
    make_deb,
    make_wheel,
    patch_files,
    patch_spec,
    root_image,
    wheel_image,
)

SITE = "opt/venv/lib/python3.11/site-packages"
MODULE = b"one\ntwo\nthree\nfour\nfive\n"
EDIT = Edit("pkg/mod.py", MODULE, MODULE.replace(b"two", b"zwei"))
SECOND = Edit("pkg/mod.py", EDIT.after, EDIT.after.replace(b"four", b"vier"))


class World:
    """A checkout and a store in which each wheel is a layer of its own."""

    def __init__(self, place: Path) -> None:
        self.mirror = place / "mirror"
        self.store: Store = open_store(place / "store")
        self.root = place / "checkout"
        self.image = wheel_image("child", [make_wheel(self.mirror, "pkg", {"pkg/mod.py": MODULE})])

    def add_wheel(self, name: str, parts: dict[str, bytes]) -> None:
        self.image.wheels = [*self.image.wheels, make_wheel(self.mirror, name, parts)]

    def layer(self, entries: list[Entry]) -> LayerRecord:
        with self.store.new_blob() as blob:
            with blob.path.open("wb") as out:
                facts = write_layer(with_parents(entries), out)
            blob.keep(facts.record.digest)
        return self.store.keep_layer(facts.record.digest, facts)

    def opened(self, **spec: Any) -> tuple[Checkout, ImagePlan, WheelTree]:
        self.image.spec |= spec
        root: Image = root_image([make_deb(self.mirror, "tool")])
        checkout = make_checkout(self.root, root, self.image)
        layers = [
            self.layer(wheel_entries(open_wheel(w, w.name), Venv())) for w in self.image.wheels
        ]
        return checkout, plan_image(checkout, "child", AMD64), WheelTree(self.store, layers)

    def own(self, **spec: Any) -> dict[str, Entry]:
        return {entry.path: entry for entry in own_entries(*self.opened(**spec))}

    def patched(self, *edits: Edit, **more: Any) -> dict[str, Entry]:
        self.image.files = patch_files(*edits, **more)
        patched = patched_entries(*self.opened(patches="patches/series.yaml"))
        return {entry.path: entry for entry in patched.entries}

    def refused(self, match: str, *edits: Edit, **more: Any) -> None:
        with pytest.raises(PatchConflict, match=match):
            self.patched(*edits, **more)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_skeleton_and_our_files_are_the_images_own(world: World) -> None:
    world.image.files = {"run.sh": "#!/bin/sh\n"}
    own = world.own(files=[{"from": "run.sh", "to": "/opt/run.sh", "mode": "0755"}])
    assert own["opt/venv/bin/python"].target == "/usr/bin/python3.11"
    run = own["opt/run.sh"]
    assert (run.mode, run.content, run.owner) == (0o755, b"#!/bin/sh\n", "child")


def test_a_file_that_is_not_there_is_refused(world: World) -> None:
    with pytest.raises(SpecInvalid, match=r"run\.sh is not in the image's folder"):
        world.own(files=[{"from": "run.sh", "to": "/opt/run.sh"}])


def test_a_folder_instead_of_a_file_is_refused(world: World) -> None:
    world.image.files = {"run.sh/x": ""}
    with pytest.raises(SpecInvalid, match=r"run\.sh is not"):
        world.own(files=[{"from": "run.sh", "to": "/opt/run.sh"}])


def test_a_preferred_file_that_a_later_wheel_hides_is_put_on_top(world: World) -> None:
    world.add_wheel("zzz", {"pkg/mod.py": b"other\n", "zzz.py": b""})
    python = {"requirements": ["pkg==1.0"], "prefer": ["pkg"]}
    assert world.own(python=python)[f"{SITE}/pkg/mod.py"].content == MODULE
    python = {"requirements": ["pkg==1.0"], "prefer": ["zzz"]}
    assert f"{SITE}/pkg/mod.py" not in world.own(python=python)


def test_wheels_that_differ_without_a_preferred_one_are_refused(world: World) -> None:
    world.add_wheel("zzz", {"pkg/mod.py": b"other\n"})
    with pytest.raises(PathConflict, match=r"pkg/mod\.py: pkg and zzz"):
        world.own()


def test_a_cuda_home_leads_into_the_wheels(world: World) -> None:
    world.add_wheel("nvcc", {"nvidia/nvcc/bin/nvcc": b"1", "nvidia/nvcc/lib/libx.so.1": b"2"})
    own = world.own(cuda={"from": ["nvidia/nvcc"]})
    assert own["usr/local/cuda/bin/nvcc"].target == f"/{SITE}/nvidia/nvcc/bin/nvcc"
    assert own["usr/local/cuda/lib/libx.so"].target == "libx.so.1"


def test_a_cuda_home_without_its_wheel_is_refused(world: World) -> None:
    with pytest.raises(SpecInvalid, match="nvidia/nvcc"):
        world.own(cuda={"from": ["nvidia/nvcc"]})


def row(path: str, kind: str = "dir", mode: int = 0o755, target: str = "") -> FileRow:
    return FileRow(path, kind, mode, 0, "", 0, target, "base")


def above(world: World, path: str, *below: FileRow, kind: Kind = Kind.FILE) -> dict[str, Entry]:
    entry = Entry(path, kind, 0o644, b"1" if kind is Kind.FILE else None)
    plan = world.opened()[1]
    return {e.path: e for e in folders_above([entry], [list(below)], plan)}


def test_folders_keep_the_mode_and_owner_they_have_below(world: World) -> None:
    folders = above(world, "tmp/x", row("tmp", mode=0o1777))
    assert folders["tmp"].mode == 0o1777
    home = above(world, "home/engine/.x", row("home"), row("home/engine"))["home/engine"]
    assert (home.mode, home.uid, home.gid) == (0o755, 1000, 1000)


def test_folders_that_are_new_are_left_to_be_made(world: World) -> None:
    assert above(world, "opt/new/x", row("opt")).keys() == {"opt"}


def test_a_file_may_replace_a_file_or_a_link(world: World) -> None:
    etc = {"etc"}
    assert above(world, "etc/x", row("etc"), row("etc/x", "file")).keys() == etc
    assert above(world, "etc/x", row("etc"), row("etc/x", "symlink")).keys() == etc
    link = above(world, "etc/x", row("etc"), row("etc/x", "symlink"), kind=Kind.SYMLINK)
    assert link.keys() == etc


@pytest.mark.parametrize("kind", ["symlink", "file", "hardlink"])
def test_a_file_below_something_that_is_no_folder_is_refused(world: World, kind: str) -> None:
    with pytest.raises(SpecInvalid, match=f"below /bin, a {kind}"):
        above(world, "bin/tool", row("bin", kind, target="usr/bin"))


def test_a_file_in_the_place_of_a_folder_is_refused(world: World) -> None:
    with pytest.raises(SpecInvalid, match="would replace /tmp, a dir of base"):
        above(world, "tmp", row("tmp"))


@pytest.mark.parametrize("kind", ["dir", "file"])
def test_a_link_in_the_place_of_anything_else_is_refused(world: World, kind: str) -> None:
    with pytest.raises(SpecInvalid, match="would replace"):
        above(world, "opt/venv/lib64", row("opt/venv/lib64", kind), kind=Kind.SYMLINK)


def test_the_last_layer_below_is_the_one_that_counts(world: World) -> None:
    entry = Entry("a/x", Kind.FILE, 0o644, b"1")
    layers = [[row("a", "symlink")], [row("a", mode=0o700)]]
    assert folders_above([entry], layers, world.opened()[1])[0].mode == 0o700


def record_of(entries: dict[str, Entry], name: str) -> dict[str, str]:
    text = entries[f"{SITE}/{name}-1.0.dist-info/RECORD"].content
    assert isinstance(text, bytes)
    return {r[0]: ",".join(r) for r in csv.reader(io.StringIO(text.decode()))}


def test_a_patch_changes_its_file_and_nothing_else(world: World) -> None:
    entries = world.patched(EDIT)
    assert entries[f"{SITE}/pkg/mod.py"].content == EDIT.after
    assert entries.keys() == {f"{SITE}/pkg/mod.py", f"{SITE}/pkg-1.0.dist-info/RECORD"}


def test_a_patched_file_keeps_its_RECORD_hash_true(world: World) -> None:
    record = record_of(world.patched(EDIT), "pkg")
    assert record["pkg/mod.py"] == record_row("pkg/mod.py", EDIT.after).strip()
    assert record["pkg-1.0.dist-info/RECORD"] == "pkg-1.0.dist-info/RECORD,,"


def test_the_other_rows_of_RECORD_stay_as_they_are(world: World) -> None:
    tree = world.opened()[2]
    place = tree.find(f"{SITE}/pkg-1.0.dist-info/RECORD")
    assert place is not None
    text = tree.read(*place).decode()
    want = {r[0]: ",".join(r) for r in csv.reader(io.StringIO(text))}
    got = record_of(world.patched(EDIT), "pkg")
    assert {k for k in want if want[k] != got[k]} == {"pkg/mod.py"}


def test_a_patch_over_two_wheels_corrects_both_RECORDs(world: World) -> None:
    world.add_wheel("zzz", {"zzz.py": MODULE})
    other = Edit("zzz.py", MODULE, MODULE.replace(b"one", b"eins"))
    entries = world.patched(EDIT, other)
    assert record_of(entries, "zzz")["zzz.py"] == record_row("zzz.py", other.after).strip()
    assert record_of(entries, "pkg")["pkg/mod.py"] == record_row("pkg/mod.py", EDIT.after).strip()


def test_patches_of_one_file_are_applied_one_on_the_other(world: World) -> None:
    specs = [patch_spec(EDIT), patch_spec(SECOND, file="0002.patch")]
    world.image.files = {
        "patches/series.yaml": json.dumps({"patches": specs}),
        "patches/0001.patch": EDIT.diff,
        "patches/0002.patch": SECOND.diff,
    }
    patched = patched_entries(*world.opened(patches="patches/series.yaml"))
    assert {e.path: e.content for e in patched.entries}[f"{SITE}/pkg/mod.py"] == SECOND.after
    assert "+zwei" in patched.diff
    assert "+vier" in patched.diff


def test_an_image_without_patches_has_no_patched_files(world: World) -> None:
    assert patched_entries(*world.opened()).entries == []


def test_a_patch_for_another_version_is_refused(world: World) -> None:
    world.refused("is for pkg==2.0, the lock has pkg 1.0", EDIT, applies_to="pkg==2.0")
    world.refused("the lock has no other", EDIT, applies_to="other==1.0")


def test_the_name_of_a_project_may_be_spelled_otherwise(world: World) -> None:
    assert world.patched(EDIT, applies_to="PKG>=1.0")


def test_a_version_range_that_is_none_is_refused(world: World) -> None:
    with pytest.raises(SpecInvalid):
        world.patched(EDIT, applies_to="pkg ist 1.0")


def test_a_wrong_hash_before_is_refused(world: World) -> None:
    wrong = [{**EDIT.promise, "before": "sha256:" + "0" * 64}]
    world.refused("before the patch is", EDIT, files=wrong)


def test_a_wrong_hash_after_is_refused(world: World) -> None:
    wrong = [{**EDIT.promise, "after": "sha256:" + "0" * 64}]
    world.refused("after the patch is", EDIT, files=wrong)


def test_a_file_in_no_wheel_is_refused(world: World) -> None:
    world.refused("is in no wheel", replace(EDIT, path="pkg/other.py"))


def test_a_change_that_the_series_does_not_promise_is_refused(world: World) -> None:
    world.add_wheel("zzz", {"zzz.py": MODULE})
    other = Edit("zzz.py", MODULE, MODULE + b"six\n")
    world.refused(
        r"changes zzz\.py, which series\.yaml does not list", EDIT, other, files=[EDIT.promise]
    )


def test_a_promise_that_the_patch_does_not_keep_is_refused(world: World) -> None:
    world.add_wheel("zzz", {"zzz.py": MODULE})
    other = Edit("zzz.py", MODULE, MODULE)
    world.refused(r"series\.yaml lists zzz\.py, which it does not change", EDIT, other)


def test_a_patch_that_is_not_there_is_refused(world: World) -> None:
    world.refused("cannot be read", EDIT, file="0009.patch")


def test_a_patch_that_is_no_text_is_refused(world: World) -> None:
    checkout, plan, tree = _with_patch(world, b"\xff\xfe")
    with pytest.raises(PatchConflict, match="cannot be read"):
        patched_entries(checkout, plan, tree)


def test_carriage_returns_are_not_taken_out_of_a_patch(world: World) -> None:
    checkout, plan, tree = _with_patch(world, EDIT.diff.replace("\n", "\r\n").encode())
    with pytest.raises(PatchConflict, match="expected"):
        patched_entries(checkout, plan, tree)


def _with_patch(world: World, raw: bytes) -> tuple[Checkout, ImagePlan, WheelTree]:
    world.image.files = patch_files(EDIT)
    opened = world.opened(patches="patches/series.yaml")
    (opened[0].folder("child") / "patches/0001.patch").write_bytes(raw)
    return opened


def test_an_edited_patch_can_be_taken_as_it_is(world: World) -> None:
    edited = Edit("pkg/mod.py", MODULE, MODULE.replace(b"two", b"deux"))
    checkout, plan, tree = _with_patch(world, edited.diff.encode())
    with pytest.raises(PatchConflict, match="after the patch"):
        patched_entries(checkout, plan, tree)
    refresh_series(checkout, plan, tree)
    assert patched_entries(checkout, plan, tree).entries[0].content == edited.after


def test_taking_a_patch_as_it_is_does_not_bend_the_file_it_is_for(world: World) -> None:
    checkout, plan, tree = _with_patch(world, replace(EDIT, before=b"x\n" + MODULE).diff.encode())
    before = (checkout.folder("child") / "patches/series.yaml").read_bytes()
    with pytest.raises(PatchConflict):
        refresh_series(checkout, plan, tree)
    assert (checkout.folder("child") / "patches/series.yaml").read_bytes() == before


def test_a_row_with_a_comma_is_corrected_too() -> None:
    record = '"a, b.py",sha256=x,1\nc.py,sha256=y,2\n'
    got = corrected(record, {"a, b.py": b"new"})
    assert got == record_row("a, b.py", b"new") + "c.py,sha256=y,2\n"


@pytest.mark.parametrize(
    "left",
    [(), ("before",), ("after",)],
    ids=["no hash", "only before", "only after"],
)
def test_a_new_patch_needs_no_hashes_of_its_own(world: World, left: tuple[str, ...]) -> None:
    checkout, plan, tree = _with_patch(world, EDIT.diff.encode())
    series = checkout.folder("child") / "patches/series.yaml"
    whole = yaml.safe_load(series.read_text())
    short = yaml.safe_load(series.read_text())
    (file,) = short["patches"][0]["files"]
    short["patches"][0]["files"] = [{k: v for k, v in file.items() if k in ("path", *left)}]
    series.write_text(yaml.safe_dump(short))
    with pytest.raises(PatchConflict, match="has no hash of it") as refused:
        patched_entries(checkout, plan, tree)
    assert "--accept" in refused.value.hint
    refresh_series(checkout, plan, tree)
    assert yaml.safe_load(series.read_text()) == whole
    assert patched_entries(checkout, plan, tree).entries[0].content == EDIT.after


def test_a_wrong_hash_before_is_not_answered_with_accepting_it(world: World) -> None:
    checkout, plan, tree = _with_patch(world, EDIT.diff.encode())
    series = checkout.folder("child") / "patches/series.yaml"
    series.write_text(series.read_text().replace(sha256_of(EDIT.before), f"sha256:{'0' * 64}"))
    refresh_series(checkout, plan, tree)
    with pytest.raises(PatchConflict, match="before the patch") as refused:
        patched_entries(checkout, plan, tree)
    assert refused.value.hint.startswith("Redo the patch for this version")


def test_hashes_are_written_by_position() -> None:
    zero, one, two = (f"sha256:{digit * 64}" for digit in "012")
    text = f"""# kept
patches:
  - file: a.patch
    files:
      - path: a.py  # kept, too
        after: {zero}
        before: {zero}
      - {{path: b.py, after: '{zero}'}}
  - file: b.patch
    files:
    - path: a.py
      before:
"""
    new = {
        (0, 0): {"after": one},
        (0, 1): {"before": one, "after": two},
        (1, 0): {"before": one, "after": two},
    }
    assert (
        with_hashes(text, new)
        == f"""# kept
patches:
  - file: a.patch
    files:
      - path: a.py  # kept, too
        after: {one}
        before: {zero}
      - {{path: b.py, before: {one}, after: {two}}}
  - file: b.patch
    files:
    - path: a.py
      after: {two}
      before: {one}
"""
    )
