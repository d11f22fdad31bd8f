"""What lies in a store is believed by its bytes, not by its name and size."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.artifacts.containers.docker import docker_archive
from pipeline.artifacts.oci.document import read_document
from pipeline.artifacts.oci.layout import export_layout
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import (
    EvidenceIncomplete,
    OfflineMiss,
    StoreDamaged,
    StoreUnwritable,
    UnknownImage,
)
from pipeline.core.log import NoBar
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.images.assemble.image import Built
from pipeline.images.fetch.inputs import Fetcher
from pipeline.images.fetch.sources import Sources
from tests import makers
from tests.makers import file_in_image
from tests.testbed.fault_server import FaultServer
from tests.unit.support import ROOT, Command, misnamed, pin_for

pytestmark = pytest.mark.usefixtures("no_slow_helpers")
GOOD = b"x = 'good'\n"
MODULE = "opt/venv/lib/python3.11/site-packages/pkg/__init__.py"


class World:
    """A checkout with two images, the right files in a folder, and a store with another one."""

    def __init__(self, place: Path) -> None:
        self.mirror = place / "mirror"
        self.wheel = makers.make_wheel(self.mirror, "pkg", {"pkg/__init__.py": GOOD})
        self.deb = makers.make_deb(self.mirror, "tool")
        root = makers.root_image([self.deb])
        image = makers.wheel_image("child", [self.wheel])
        self.checkout = makers.make_checkout(place / "checkout", root, image)
        self.store = open_store(place / "store")

    def build(self, mirror: Path | None = None) -> Built:
        where = self.mirror if mirror is None else mirror
        return makers.build(self.checkout, self.store, where, "child")[0]

    def plant(self, good: Path, other: bytes) -> Path:
        """Other bytes of the same size under the locked file's name, as old as it looks."""
        good_bytes = good.read_bytes()
        assert len(other) == len(good_bytes)
        place = self.store.input_path(hashlib.sha256(good_bytes).hexdigest())
        place.write_bytes(other)
        os.utime(place, ns=(good.stat().st_mtime_ns, good.stat().st_mtime_ns))
        return place


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def evil_wheel(world: World) -> bytes:
    """A wheel that any installer takes: its RECORD and CRCs are true, its code is another."""
    folder, size = world.mirror.parent / "evil", world.wheel.stat().st_size
    for number in range(10_000):
        code = f"x = 'e{number:03}'\n".encode()
        path = makers.make_wheel(folder, "pkg", {"pkg/__init__.py": code})
        if path.stat().st_size == size:
            return path.read_bytes()
    raise AssertionError("no wheel of the same size")


def test_a_planted_wheel_of_the_same_size_is_fetched_again_not_built(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.plant(world.wheel, evil_wheel(world))
    built = world.build()
    assert file_in_image(world.store, built, MODULE) == GOOD
    assert misnamed(world.store.root) == []
    assert "is not the locked file" in capfd.readouterr().err


def test_a_planted_deb_of_the_same_size_is_fetched_again_not_built(world: World) -> None:
    data = world.deb.read_bytes()
    world.plant(world.deb, data[:-4] + b"evil")
    world.build()
    assert misnamed(world.store.root) == []


def test_a_planted_wheel_is_not_built_where_the_right_one_cannot_be_had(world: World) -> None:
    place = world.plant(world.wheel, evil_wheel(world))
    empty = world.mirror.parent / "empty"
    empty.mkdir()
    shutil.copy(world.deb, empty)
    with pytest.raises(OfflineMiss, match="pkg-1"):
        world.build(empty)
    assert not place.exists()
    assert world.store.image_record("child", makers.AMD64) is None


def test_a_link_in_an_inputs_place_is_not_followed(world: World) -> None:
    outside = world.mirror.parent / "outside"
    place = world.plant(world.wheel, evil_wheel(world))
    place.rename(outside)
    place.symlink_to(outside)
    assert file_in_image(world.store, world.build(), MODULE) == GOOD
    assert outside.exists()


def test_a_right_input_is_used_as_it_is(world: World) -> None:
    place = world.plant(world.wheel, world.wheel.read_bytes())
    inode = place.stat().st_ino
    world.build()
    assert place.stat().st_ino == inode


def test_a_planted_input_is_downloaded_again_and_a_right_one_is_not(
    store_root: Path, server: FaultServer
) -> None:
    store, data = open_store(store_root), os.urandom(50_000)
    pin = pin_for(data)
    server.add(pin.file, data)
    for planted, asked in ((data, 0), (data[:-1] + b"?", 1)):
        store.input_path(pin.sha256).write_bytes(planted)
        client = NetClient(NetworkSettings(indexes=(server.index,)), first_wait_s=0.001)
        fetcher = Fetcher(store, client, Sources(client), offline=False)
        ((_, path),) = fetcher.fetch_all([pin], NoBar())
        assert path.read_bytes() == data
        assert len(server.starts(pin.file)) == asked


# Handing on.


def flip(path: Path) -> None:
    """One bit, with the file's times as they were."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def parts(store: Store, built: Built) -> list[str]:
    manifest = json.loads(store.read_blob(built.digest))
    return [manifest["config"]["digest"], *(x["digest"] for x in manifest["layers"])]


# how an error names them
PARTS = ("config of ", "layer 1 of 3 ", "layer 2 of 3 ")


@pytest.mark.parametrize("number", range(3))
def test_an_image_with_a_flipped_blob_is_not_exported(world: World, number: int) -> None:
    built = world.build()
    flip(world.store.blob_path(parts(world.store, built)[number]))
    out = world.mirror.parent / "out" / "layout"
    with pytest.raises(StoreDamaged, match=r"is damaged: .* does not match its digest") as refused:
        export_layout(world.store, built.record, out)
    assert str(refused.value).startswith(PARTS[number])
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("number", range(3))
def test_an_image_with_a_flipped_blob_is_not_loaded(world: World, number: int) -> None:
    built = world.build()
    image = read_document(world.store.read_blob(built.digest))
    flip(world.store.blob_path(parts(world.store, built)[number]))
    with pytest.raises(StoreDamaged, match=f"^{PARTS[number]}.*does not match its digest"):
        list(docker_archive(world.store, image, []))


def test_a_blob_that_is_gone_or_a_link_is_not_exported(world: World) -> None:
    built = world.build()
    place = world.store.blob_path(parts(world.store, built)[-1])
    out = world.mirror.parent / "out" / "layout"
    moved = place.rename(world.mirror.parent / "moved")
    with pytest.raises(StoreDamaged, match=r"^layer 3 of 3 \(.*is missing: there is no /"):
        export_layout(world.store, built.record, out)
    place.symlink_to(moved)
    with pytest.raises(StoreDamaged, match="does not match its digest"):
        export_layout(world.store, built.record, out)
    assert list(out.parent.iterdir()) == []


def test_the_same_export_again_leaves_what_is_there_and_brings_new_evidence(world: World) -> None:
    built, out = world.build(), world.mirror.parent / "out"
    export_layout(world.store, built.record, out)
    blob = out / "blobs" / "sha256" / built.digest.removeprefix("sha256:")
    before, note = blob.stat(), world.mirror.parent / "note.dsse.json"
    note.write_text("{}")
    export_layout(world.store, built.record, out, [note])
    assert blob.stat() == before
    assert (out / "records" / note.name).read_text() == "{}"


@pytest.mark.parametrize("harm", ["cut", "gone", "link", "other index"])
def test_an_export_into_a_layout_that_is_not_this_image_whole_is_refused(
    world: World, harm: str
) -> None:
    built, out = world.build(), world.mirror.parent / "out"
    export_layout(world.store, built.record, out)
    blob = out / "blobs" / "sha256" / parts(world.store, built)[-1].removeprefix("sha256:")
    copy = world.mirror.parent / "copy"
    copy.write_bytes(blob.read_bytes())
    if harm == "other index":
        (out / "index.json").write_text("{}")
    else:
        # not in place: it is the store's own file, too
        blob.unlink()
    if harm == "cut":
        blob.touch()
    if harm == "link":
        blob.symlink_to(copy)
    with pytest.raises(StoreUnwritable, match="is not empty"):
        export_layout(world.store, built.record, out)


def test_an_export_removes_only_what_an_export_left(world: World) -> None:
    built = world.build()
    out = world.mirror.parent / "out"
    (world.mirror.parent / ".out.partial" / "blobs").mkdir(parents=True)
    export_layout(world.store, built.record, out)
    mine = world.mirror.parent / ".again.partial" / "thesis.pdf"
    mine.parent.mkdir()
    mine.write_bytes(b"mine")
    with pytest.raises(StoreUnwritable, match="is in the way"):
        export_layout(world.store, built.record, world.mirror.parent / "again")
    assert mine.read_bytes() == b"mine"


def test_an_export_into_the_empty_folder_one_is_in_works(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = world.mirror.parent / "here"
    out.mkdir()
    monkeypatch.chdir(out)
    export_layout(world.store, world.build().record, Path())
    assert (out / "index.json").is_file()


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing"])
def test_an_export_into_what_is_no_folder_is_refused(world: World, kind: str) -> None:
    out = world.mirror.parent / "out"
    (world.mirror.parent / "folder").mkdir()
    if kind == "file":
        out.write_bytes(b"mine")
    else:
        out.symlink_to(world.mirror.parent / ("folder" if kind == "link" else "absent"))
    with pytest.raises(StoreUnwritable, match="is not a folder"):
        export_layout(world.store, world.build().record, out)
    assert list((world.mirror.parent / "folder").iterdir()) == []
    assert kind != "file" or out.read_bytes() == b"mine"


# Reading where nothing can be written.


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder as a read-only mount of itself."""
    mount = ["mount", "--bind", "-o", "ro", str(folder), str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("Only root can mount a folder read-only here.")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def looks(world: World, out: Path) -> dict[str, tuple[str | Path, ...]]:
    """The commands that only look."""
    options = ("--checkout", world.checkout.root, "--store", world.store.root)
    asked: dict[str, tuple[str | Path, ...]] = {
        "images": ("image", "list"),
        "explain": ("image", "explain", "child", f"/{MODULE}"),
        "verify": ("verify", "child"),
        "export": ("image", "export", "child", out),
        "plan": ("plan",),
        "sbom": ("evidence", "sbom", "child"),
        "store show": ("store", "show"),
        "store check": ("store", "check"),
    }
    return {name: (*options, *args) for name, args in asked.items()}


def answers(world: World, out: Path, sm120: Command) -> dict[str, int]:
    """How each of them ends."""
    return {name: sm120(*args).code for name, args in looks(world, out).items()}


# one process for all commands: each of its own would take most of a second to start
_ONE_AFTER_THE_OTHER = """
import json, sys
from pipeline.cli.main import main
for name, args in json.loads(sys.argv[1]).items():
    sys.argv = ["sm120", *args]
    try:
        main()
        code = 0
    except SystemExit as ending:
        code = ending.code or 0
    print(f"ended: {name}: {code}", file=sys.stderr)
"""


def humbly(commands: Mapping[str, Sequence[str | Path]]) -> dict[str, int]:
    """How they end for root without the right to pass over modes.

    This is a user who can read this checkout, and no more.
    """
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    program = [sys.executable, "-c", _ONE_AFTER_THE_OTHER, json.dumps(commands, default=str)]
    done = subprocess.run(
        [*drop, *program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    ended = re.findall(r"^ended: (.+): (\d+)$", done.stderr, re.M)
    return {name: int(code) for name, code in ended}


def tree(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.lstat().st_mtime_ns for p in root.rglob("*")}


def test_a_store_on_a_read_only_disk_still_answers(world: World, sm120: Command) -> None:
    world.build()
    before = tree(world.store.root)
    with read_only(world.store.root):
        codes = answers(world, world.mirror.parent / "out", sm120)
    # nothing was recorded of it: incomplete, and nothing worse
    assert codes == {**dict.fromkeys(codes, 0), "verify": EvidenceIncomplete.exit_code}
    assert tree(world.store.root) == before
    assert (world.mirror.parent / "out" / "index.json").is_file()


def test_a_store_of_somebody_else_still_answers(world: World) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("Only root can become somebody else here.")
    world.build()
    for path in [world.store.root, *world.store.root.rglob("*")]:
        os.chown(path, 65534, 65534)
    before = tree(world.store.root)
    asked = looks(world, world.mirror.parent / "out")
    options = ("--checkout", world.checkout.root, "--store", world.store.root)
    codes = humbly({**asked, "build": (*options, "build")})
    differ = {"verify": EvidenceIncomplete.exit_code, "build": StoreUnwritable.exit_code}
    assert codes == {**dict.fromkeys(asked, 0), **differ}
    assert tree(world.store.root) == before


def test_a_store_that_is_not_there_is_looked_at_and_not_made(world: World, sm120: Command) -> None:
    shutil.rmtree(world.store.root)
    codes = answers(world, world.mirror.parent / "out", sm120)
    looked = ("images", "plan", "store show", "store check")
    assert codes == {**dict.fromkeys(codes, UnknownImage.exit_code), **dict.fromkeys(looked, 0)}
    assert not world.store.root.exists()
