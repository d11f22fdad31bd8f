from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.core import model
from pipeline.core.errors import (
    CorruptArchive,
    GoldenMismatch,
    OfflineMiss,
    PatchConflict,
    PathConflict,
    PipelineError,
    SpecInvalid,
    StoreDamaged,
)
from pipeline.core.model import sha256_of
from pipeline.evidence.statements.inventory import placed_layers
from pipeline.images.assemble import locked_layers as pinned
from pipeline.images.assemble import plan
from pipeline.images.assemble.image import Built, assemble_images, code_digest, find_built
from pipeline.images.assemble.plan import plan_image
from pipeline.images.assemble.venv import record_row
from pipeline.images.spec.checkout import Checkout
from tests.makers import (
    AMD64,
    Edit,
    Image,
    build,
    file_in_image,
    folder_fetcher,
    make_checkout,
    make_deb,
    make_wheel,
    patch_files,
    root_image,
    wheel_image,
)
from tests.testbed.deb_file import Item, hard_link, symlink

SITE = "opt/venv/lib/python3.11/site-packages"
MODULE = b"one\ntwo\nthree\n"
EDIT = Edit("pkg/mod.py", MODULE, b"one\nzwei\nthree\n")
NOISE = random.Random(5).randbytes(30_000)


class World:
    """A checkout of two images, a folder with their files, and a store."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.mirror = place / "mirror"
        self.store: Store = open_store(place / "store")
        tool = Item("./usr/bin/tool", b"#!/bin/sh\n", mode=0o755)
        deb = make_deb(
            self.mirror, "tool", tool, hard_link("./usr/bin/also", "./usr/bin/tool"),
            symlink("./usr/bin/link", "tool"),
        )  # fmt: skip
        pkg = make_wheel(
            self.mirror,
            "pkg",
            {"pkg/mod.py": MODULE, "pkg-1.0.dist-info/entry_points.txt": POINTS},
        )
        self.root = root_image([deb])
        big = make_wheel(self.mirror, "big", {"big/data": NOISE})
        self.child = wheel_image("child", [big, pkg], patches="patches/series.yaml", user="engine")
        self.child.spec["python"]["requirements"] = ["pkg==1.0", "big"]
        self.child.spec["files"] = [{"from": "run.sh", "to": "/opt/run.sh", "mode": "0755"}]
        self.child.files = {**patch_files(EDIT), "run.sh": "#!/bin/sh\n"}

    def checkout(self, *more: Image) -> Checkout:
        return make_checkout(self.place / "checkout", self.root, self.child, *more)

    def build(self, *names: str, **options: Any) -> list[Built]:
        return build(self.checkout(), self.store, self.mirror, *(names or ["child"]), **options)

    def inputs(self) -> set[str]:
        held = {p.name for p in (self.store.root / "inputs").iterdir()}
        return {p.name for p in self.mirror.iterdir() if _hex(p) in held}


POINTS = b"[console_scripts]\nhello = pkg.mod:main\n"


def _hex(path: Path) -> str:
    return sha256_of(path.read_bytes()).removeprefix("sha256:")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    for module in (plan, pinned):
        monkeypatch.setattr(module, "BIG_WHEEL_BYTES", 20_000)
    return World(tmp_path)


def digests(built: Built) -> dict[str, str]:
    return {layer.title: layer.record.digest for layer in built.layers}


def seen(store: Store, built: Built) -> dict[str, tarfile.TarInfo]:
    """Paths as a container would see them."""
    infos: dict[str, tarfile.TarInfo] = {}
    for layer in built.layers:
        with tarfile.open(store.blob_path(layer.record.digest)) as tar:
            infos |= {info.name: info for info in tar}
    return infos


def bytes_at(store: Store, built: Built, path: str) -> bytes:
    for layer in reversed(built.layers):
        with tarfile.open(store.blob_path(layer.record.digest)) as tar:
            if path in tar.getnames():
                handle = tar.extractfile(path)
                assert handle is not None
                return handle.read()
    raise AssertionError(path)


def test_an_image_holds_debs_wheels_files_and_patches(world: World) -> None:
    built = world.build(processes=True)[0]
    assert list(digests(built)) == [
        "1 Debian packages",
        "big 1.0",
        "1 small wheels",
        "child files",
        "patches",
    ]
    paths = seen(world.store, built)
    assert {"usr/bin/tool", f"{SITE}/big/data", "opt/venv/bin/hello", "opt/run.sh"} <= paths.keys()
    assert (paths["usr/bin/tool"].islnk(), paths["opt/run.sh"].mode) == (True, 0o755)
    assert bytes_at(world.store, built, f"{SITE}/pkg/mod.py") == EDIT.after


def test_manifest_config_and_index_agree_with_the_blobs(world: World) -> None:
    built = world.build()[0]
    manifest = json.loads(world.store.read_blob(built.digest))
    config = json.loads(world.store.read_blob(manifest["config"]["digest"]))
    for layer, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        raw = world.store.blob_path(layer["digest"]).read_bytes()
        assert (sha256_of(raw), len(raw)) == (layer["digest"], layer["size"])
        assert sha256_of(gzip.decompress(raw)) == diff_id
    index = json.loads((world.store.root / "oci/index.json").read_bytes())
    assert [m["digest"] for m in index["manifests"]] == [built.digest]
    assert config["config"]["User"] == "1000:1000"


def test_a_second_build_has_nothing_to_do_and_asks_nobody(world: World) -> None:
    first = world.build()[0]
    checkout = world.checkout()
    plans = [plan_image(checkout, "child", AMD64)]

    def nobody() -> Any:
        raise AssertionError("nothing was to be fetched")

    second = assemble_images(checkout, world.store, plans, nobody)[0]
    assert (second.digest, second.cached, first.cached) == (first.digest, True, False)


def test_another_folder_and_an_empty_store_give_the_same_digest(
    world: World, tmp_path: Path
) -> None:
    other = World(tmp_path / "somewhere" / "else")
    assert world.build()[0].digest == other.build(processes=True)[0].digest


def test_two_images_share_their_layers(world: World) -> None:
    two = wheel_image("two", world.child.wheels[:1])
    checkout = world.checkout(two)
    one, other = build(checkout, world.store, world.mirror, "child", "two")
    shared = set(digests(one).values()) & set(digests(other).values())
    assert shared == {digests(one)["1 Debian packages"], digests(one)["big 1.0"]}


def test_a_line_in_a_patch_changes_only_the_top_layer(world: World) -> None:
    before = world.build()[0]
    edited = Edit("pkg/mod.py", MODULE, b"one\ndeux\nthree\n")
    world.child.files |= patch_files(edited)
    after = world.build()[0]
    assert after.digest != before.digest
    moved = [t for t in digests(before) if digests(before)[t] != digests(after)[t]]
    assert moved == ["patches"]
    assert after.layers[-1].record.size_bytes < 5000


def test_a_changed_file_of_ours_changes_only_our_layer(world: World) -> None:
    before = world.build()[0]
    world.child.files["run.sh"] += "true\n"
    after = world.build()[0]
    assert [t for t in digests(before) if digests(before)[t] != digests(after)[t]] == [
        "child files"
    ]


def test_changed_words_in_the_spec_change_no_layer(world: World) -> None:
    before = world.build()[0]
    world.child.spec["env"] = {"A": "1"}
    after = world.build()[0]
    assert (after.digest != before.digest, digests(after)) == (True, digests(before))


def test_a_big_wheel_is_dropped_once_its_layer_is_done(world: World) -> None:
    world.build()
    assert world.inputs() == {"tool_1.0_amd64.deb", "pkg-1.0-py3-none-any.whl"}


def test_a_big_wheel_is_kept_when_asked_for(world: World) -> None:
    world.build(keep_inputs=True)
    assert "big-1.0-py3-none-any.whl" in world.inputs()


def test_a_big_wheel_is_not_dropped_while_another_layer_needs_it(world: World) -> None:
    others = []
    for minor in range(12, 20):
        other = wheel_image(f"py{minor}", world.child.wheels[:1], python={"version": f"3.{minor}"})
        others.append(other)
    checkout = world.checkout(*others)
    built = build(checkout, world.store, world.mirror, *(o.name for o in others))
    assert len({digests(b)["big 1.0"] for b in built}) == len(others)
    assert "big-1.0-py3-none-any.whl" not in world.inputs()


def test_a_dropped_wheel_is_not_fetched_again(world: World) -> None:
    world.build()
    world.child.spec["env"] = {"A": "1"}
    (world.mirror / "big-1.0-py3-none-any.whl").rename(world.place / "gone")
    shutil.copy(world.place / "gone", world.place / "big-1.0-py3-none-any.whl")
    world.child.wheels = [world.place / "big-1.0-py3-none-any.whl", world.child.wheels[1]]
    assert not world.build()[0].cached


def test_a_wheel_on_the_base_of_an_image_that_is_not_built_is_enough(world: World) -> None:
    built = world.build("child")[0]
    checkout = world.checkout()
    assert find_built(world.store, plan_image(checkout, "root", AMD64)) is None
    assert digests(world.build("root")[0]).items() <= digests(built).items()


def test_a_root_image_may_have_no_accounts_or_several(world: World) -> None:
    accounts = world.root.spec["accounts"]
    world.child.spec.pop("user")
    world.root.spec["accounts"] = []
    world.build("root")
    more = {"name": "second", "uid": 1001, "gid": 1001, "home": "/home/second"}
    world.root.spec["accounts"] = [*accounts, more]
    built = world.build("root")[0]
    assert seen(world.store, built)["home/second"].uid == 1001


def test_the_applied_change_is_kept_for_people(world: World) -> None:
    world.build()
    diff = (world.store.image_folder("child", AMD64) / "patches.diff").read_text()
    assert "-two\n+zwei\n" in diff


def refused(world: World, kind: type[PipelineError], match: str = ".", **options: Any) -> None:
    """A build that ends badly leaves no image behind, and no half files."""
    with pytest.raises(kind, match=match):
        world.build(**options)
    assert world.store.image_record("child", AMD64) is None
    assert not any((world.store.root / "tmp").iterdir())


def test_a_build_without_a_golden_digest_is_refused(world: World) -> None:
    refused(world, GoldenMismatch, "no expected digest", accept=False)


def test_a_build_that_is_not_its_golden_digest_is_refused(world: World) -> None:
    other = World(world.place / "other")
    other.build()
    world.child.files["run.sh"] += "true\n"
    golden = world.checkout().golden_path
    shutil.copy(other.checkout().golden_path, golden)
    refused(world, GoldenMismatch, "inputs changed: files", accept=False)


def test_the_golden_digest_of_another_machine_is_accepted(world: World) -> None:
    other = World(world.place / "other")
    other.build()
    shutil.copy(other.checkout().golden_path, world.checkout().golden_path)
    world.build(accept=False)


def test_a_file_that_nobody_has_is_refused(world: World) -> None:
    checkout = world.checkout()
    plans = [plan_image(checkout, "child", AMD64)]
    empty = world.place / "empty"
    empty.mkdir()
    with pytest.raises(OfflineMiss):
        assemble_images(checkout, world.store, plans, lambda: folder_fetcher(world.store, empty))


def test_a_damaged_wheel_stops_the_build_and_is_named(world: World) -> None:
    bad = make_wheel(world.mirror, "bad", {"bad.py": MODULE, "bad-1.0.dist-info/RECORD": b""})
    world.child.wheels = [*world.child.wheels, bad]
    refused(world, CorruptArchive, r"bad-1\.0-py3-none-any\.whl: ", processes=True)


def test_a_damaged_deb_stops_the_build_and_is_named(world: World) -> None:
    bad = world.mirror / "bad_1.0_amd64.deb"
    bad.write_bytes(b"!<arch>\n")
    world.root.debs = [*world.root.debs, bad]
    refused(world, CorruptArchive, r"bad_1\.0_amd64\.deb: ")


def test_wheels_that_differ_stop_the_build(world: World) -> None:
    world.child.wheels = [
        *world.child.wheels,
        make_wheel(world.mirror, "zzz", {"pkg/mod.py": b"1"}),
    ]
    refused(world, PathConflict, "pkg and zzz")


def test_a_file_and_a_folder_in_one_layer_stop_the_build(world: World) -> None:
    world.child.wheels = [*world.child.wheels, make_wheel(world.mirror, "zzz", {"pkg": b"1"})]
    refused(world, PathConflict, "is a file")


def test_a_file_and_a_folder_in_two_layers_stop_the_build(world: World) -> None:
    world.child.wheels = [*world.child.wheels, make_wheel(world.mirror, "zzz", {"big": b"1"})]
    refused(world, PathConflict, "/big: is a file")


def test_a_patch_that_does_not_fit_stops_the_build(world: World) -> None:
    world.child.files |= patch_files(Edit("pkg/mod.py", b"other\n" + MODULE, EDIT.after))
    refused(world, PatchConflict, accept=False)


def test_a_file_over_a_link_of_the_base_stops_the_build(world: World) -> None:
    world.child.spec["files"] = [{"from": "run.sh", "to": "/bin/run.sh"}]
    refused(world, SpecInvalid, "below /bin, a symlink")


def test_a_wheel_that_replaces_the_interpreter_stops_the_build(world: World) -> None:
    parts = {"zzz-1.0.data/scripts/python": b"#!/bin/sh\n"}
    world.child.wheels = [*world.child.wheels, make_wheel(world.mirror, "zzz", parts)]
    refused(world, SpecInvalid, "would replace /opt/venv/bin/python, a file of zzz")


def test_too_many_layers_stop_the_build(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_LAYERS", 5)
    refused(world, SpecInvalid, "5 layers")


def test_an_account_that_passwd_cannot_hold_stops_the_build(world: World) -> None:
    world.root.spec["accounts"][0]["name"] = "engine.one"
    world.child.spec.pop("user")
    refused(world, SpecInvalid, r"accounts?: engine\.one|accounts\.0")


def test_a_layer_that_vanished_is_made_again(world: World) -> None:
    first = world.build()[0]
    world.store.blob_path(digests(first)["1 small wheels"]).unlink()
    assert world.build()[0].digest == first.digest


def test_a_damaged_layer_is_found_when_a_patch_reads_it(world: World) -> None:
    first = world.build()[0]
    blob = world.store.blob_path(digests(first)["1 small wheels"])
    raw = blob.read_bytes()
    blob.write_bytes(raw[: len(raw) // 3] + bytes(len(raw) - len(raw) // 3))
    world.child.spec["env"] = {"A": "1"}
    with pytest.raises(StoreDamaged):
        world.build()


def test_a_tar_of_every_layer_can_be_listed(world: World) -> None:
    for layer in world.build()[0].layers:
        raw = world.store.blob_path(layer.record.digest).read_bytes()
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(raw))) as tar:
            names = tar.getnames()
        assert names == sorted(names)


def mine(*edits: Edit, **spec: Any) -> Image:
    """An image of one's own on the child, that patches a wheel of it."""
    files = patch_files(*edits)
    body = {
        "name": "mine",
        "summary": "an image of my own",
        "base": "child",
        "platforms": [AMD64],
        "patches": "patches/series.yaml",
        **spec,
    }
    return Image(body, files=files)


SECOND = Edit("pkg/mod.py", EDIT.after, EDIT.after.replace(b"three", b"drei"))


def built_mine(world: World, image: Image) -> Built:
    checkout = world.checkout(image)
    return build(checkout, world.store, world.mirror, "mine")[0]


def test_a_patch_may_be_for_a_wheel_of_the_base(world: World) -> None:
    world.child.spec.pop("patches")
    built = built_mine(world, mine(EDIT))
    assert file_in_image(world.store, built, f"{SITE}/pkg/mod.py") == EDIT.after
    assert [layer.title for layer in built.layers].count("patches") == 1


def test_a_patch_on_a_patched_base_starts_from_what_the_base_left(world: World) -> None:
    built = built_mine(world, mine(SECOND))
    assert file_in_image(world.store, built, f"{SITE}/pkg/mod.py") == b"one\nzwei\ndrei\n"


def test_RECORD_stays_true_for_files_that_only_the_base_patched(world: World) -> None:
    pkg = make_wheel(world.mirror, "pkg", {"pkg/mod.py": MODULE, "pkg/more.py": MODULE})
    world.child.wheels = [world.child.wheels[0], pkg]
    more = Edit("pkg/more.py", MODULE, b"one\ntwo\ntrois\n")
    built = built_mine(world, mine(more))
    record = file_in_image(world.store, built, f"{SITE}/pkg-1.0.dist-info/RECORD") or b""
    for edit in (EDIT, more):
        assert record_row(edit.path, edit.after) in record.decode()


def test_a_patch_that_ignores_those_of_the_base_is_refused(world: World) -> None:
    with pytest.raises(PatchConflict, match=r"pkg/mod\.py line 2 is 'zwei', expected 'two'"):
        built_mine(world, mine(Edit("pkg/mod.py", MODULE, MODULE.replace(b"two", b"deux"))))


def test_an_own_wheel_over_a_patched_base_is_patched_as_published(world: World) -> None:
    image = mine(
        Edit("pkg/mod.py", MODULE, b"one\ndeux\nthree\n"), python={"requirements": ["pkg==1.0"]}
    )
    image.wheels = [world.child.wheels[1]]
    built = built_mine(world, image)
    assert file_in_image(world.store, built, f"{SITE}/pkg/mod.py") == b"one\ndeux\nthree\n"


def test_another_version_of_a_wheel_of_the_base_is_refused_with_the_way_out(world: World) -> None:
    wheel = make_wheel(world.mirror, "pkg", {"pkg/mod.py": b"four\n"}, version="2.0")
    image = mine(SECOND, python={"requirements": ["pkg==2.0"]}, patches=None)
    image.wheels = [wheel]
    with pytest.raises(PathConflict, match="pkg is there twice, with different bytes") as caught:
        built_mine(world, image)
    assert "prefer" not in caught.value.hint


def test_a_patch_for_a_version_that_the_base_has_not_is_refused(world: World) -> None:
    image = mine(SECOND)
    image.files = patch_files(SECOND, applies_to="pkg==3.0")
    with pytest.raises(PatchConflict, match=r"is for pkg==3\.0, the lock has pkg 1\.0"):
        built_mine(world, image)


def test_accept_writes_what_a_file_is_after_the_bases_patches_and_after_its_own(
    world: World,
) -> None:
    image = mine(SECOND)
    image.files = patch_files(SECOND, files=[{"path": SECOND.path}])
    checkout = world.checkout(image)
    build(checkout, world.store, world.mirror, "mine")
    ((promise,),) = (p.files for p in checkout.series(checkout.chain("mine", AMD64)[-1]).patches)
    assert (promise.before, promise.after) == (sha256_of(SECOND.before), sha256_of(SECOND.after))


def test_a_patch_is_not_taken_for_one_of_the_base(world: World) -> None:
    world.child.spec.pop("patches")
    built = built_mine(world, mine(EDIT))
    assert [x.image for x in placed_layers(built) if x.layer.title == "patches"] == ["mine"]


def test_the_digest_of_our_code_holds_what_writes_the_json_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_digest.__wrapped__()
    assert before == code_digest.__wrapped__()
    other = tmp_path / "model.py"
    other.write_text(Path(model.__file__).read_text().replace("sort_keys=True", "sort_keys=False"))
    monkeypatch.setattr(model, "__file__", str(other))
    assert code_digest.__wrapped__() != before
