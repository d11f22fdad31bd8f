"""Images on somebody else's base: its layers stay as they are, ours go on top."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.artifacts.store.upkeep import damaged, remove_files, unreachable
from pipeline.core.errors import (
    BaseUnusable,
    CorruptArchive,
    HostileArchive,
    LockEdited,
    OfflineMiss,
    SpecInvalid,
    StoreDamaged,
)
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.plan import plan_image, work_for
from pipeline.images.fetch.base import Bases
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ForeignBase
from tests.makers import AMD64, Image, build, make_checkout, make_wheel
from tests.testbed.foreign_image import (
    PLAIN_LAYER,
    REPOSITORY,
    SETTINGS,
    ZSTD_LAYER,
    ForeignImage,
    Layer,
    Thing,
    folder,
    foreign_image,
    gzipped,
    layer_of,
    link,
    system_layer,
    tar_of,
    zstd_packed,
)


def pinned(place: Path, image: ForeignImage, store: Store) -> Any:
    """The base as `sm120 image lock` pins it, from a folder."""
    image.write(place)
    bases = Bases(store, BaseSettings(folders=(place,)))
    return bases.resolve(ForeignBase(repository=REPOSITORY, digest=image.digest), AMD64)


def spec_on(image: ForeignImage, **more: Any) -> dict[str, Any]:
    return {
        "name": "mine",
        "summary": "something of ours on a foreign base",
        "base": f"{REPOSITORY}@{image.digest}",
        "platforms": [AMD64],
        "files": [{"from": "tool", "to": "/opt/tool"}],
        **more,
    }


def checkout_on(
    place: Path, image: ForeignImage, *others: Image, wheels: Any = (), **more: Any
) -> Checkout:
    files = {"tool": "new\n", **more.pop("own", {})}
    pin = pinned(place / "mirror", image, open_store(place / "lock-store"))
    mine = Image(spec_on(image, **more), wheels, files=files, base_image=pin)
    return make_checkout(place / "checkout", mine, *others)


def built_on(place: Path, image: ForeignImage, *names: str, **more: Any) -> tuple[Built, Store]:
    checkout = checkout_on(place, image, **more)
    store = open_store(place / "store")
    return build(checkout, store, place / "mirror", *(names or ("mine",)))[-1], store


def config(store: Store, built: Built) -> dict[str, Any]:
    config_json: dict[str, Any] = json.loads(
        store.read_blob(json.loads(store.read_blob(built.digest))["config"]["digest"])
    )
    return config_json


def test_the_bases_layers_lie_unchanged_at_the_bottom(tmp_path: Path) -> None:
    image = foreign_image(system_layer(), layer_of(Thing("etc/more", b"x")))
    built, store = built_on(tmp_path, image)
    layers = json.loads(store.read_blob(built.digest))["layers"]
    assert [x["digest"] for x in layers[:2]] == [x.described["digest"] for x in image.layers]
    assert len(layers) == 3
    made = config(store, built)
    assert made["rootfs"]["diff_ids"][:2] == [x.diff_id for x in image.layers]
    assert [h["created_by"] for h in made["history"]] == [
        *("step 0", "step 1", "ENV LANG=C", "sm120: mine files")
    ]
    for layer in layers:
        assert store.blob_path(layer["digest"]).stat().st_size == layer["size"]


def test_another_store_and_folder_give_the_same_digest(tmp_path: Path) -> None:
    image = foreign_image()
    python = {"python": {"requirements": ["pkg==1.0"]}}
    digests = []
    for name in ("one", "two"):
        wheel = make_wheel(tmp_path / name / "mirror", "pkg")
        digests.append(built_on(tmp_path / name, image, wheels=[wheel], **python)[0].digest)
    assert digests[0] == digests[1]


def test_a_base_of_our_own_layers_gives_the_same_digest_where_it_was_built(tmp_path: Path) -> None:
    """Where a layer of the base is known as ours, too, its table of contents is another one."""
    ours, first = built_on(
        tmp_path / "a", foreign_image(), files=[{"from": "tool", "to": "/home/app/tool"}]
    )
    manifest = first.read_blob(ours.digest)
    document = json.loads(manifest)
    blobs = [first.blob_path(x["digest"]).read_bytes() for x in document["layers"]]
    ids = config(first, ours)["rootfs"]["diff_ids"]
    layers = tuple(Layer(b, d) for b, d in zip(blobs, ids, strict=True))
    image = ForeignImage(layers, first.read_blob(document["config"]["digest"]), manifest)
    own_table = first.contents(ours.layers[-1].record)
    more = {"files": [{"from": "tool", "to": "/home/app/other"}]}
    checkout = checkout_on(tmp_path / "b", image, **more)
    there = build(checkout, first, tmp_path / "b" / "mirror", "mine")[0]
    elsewhere = build(checkout, open_store(tmp_path / "s"), tmp_path / "b" / "mirror", "mine")[0]
    assert there.digest == elsewhere.digest
    assert first.contents(ours.layers[-1].record) == own_table


def test_ours_wins_and_the_rest_of_the_base_stays(tmp_path: Path) -> None:
    more = {"env": {"LANG": "C.UTF-8"}, "ports": [80], "command": ["--serve"]}
    built, store = built_on(tmp_path, foreign_image(), **more)
    made = config(store, built)
    runs = made["config"]
    assert runs["Env"] == ["LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin"]
    assert runs["Entrypoint"] == ["/usr/bin/tool"]
    assert runs["Cmd"] == ["--serve"]
    assert runs["User"] == "app"
    assert runs["WorkingDir"] == "/home/app"
    assert runs["ExposedPorts"] == {"53/udp": {}, "80/tcp": {}}
    assert runs["Volumes"] == {"/data": {}}
    assert runs["StopSignal"] == "SIGINT"
    assert "Healthcheck" not in runs
    assert made["created"] == "1980-01-01T00:00:00Z"


def test_the_bases_labels_do_not_speak_for_our_image(tmp_path: Path) -> None:
    built, store = built_on(tmp_path, image := foreign_image())
    labels = config(store, built)["config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "mine"
    assert labels["sm120.lock"].startswith("sha256:")
    assert labels["org.opencontainers.image.base.name"] == REPOSITORY
    assert labels["org.opencontainers.image.base.digest"] == image.digest


def test_an_own_entrypoint_drops_the_bases_command(tmp_path: Path) -> None:
    built, store = built_on(tmp_path, foreign_image(), entrypoint=["/opt/tool"])
    runs = config(store, built)["config"]
    assert runs["Entrypoint"] == ["/opt/tool"]
    assert "Cmd" not in runs


def test_nothing_said_inherits_entrypoint_and_command(tmp_path: Path) -> None:
    built, store = built_on(tmp_path, foreign_image())
    runs = config(store, built)["config"]
    assert (runs["Entrypoint"], runs["Cmd"]) == (["/usr/bin/tool"], ["--help"])


@pytest.mark.parametrize(
    ("user", "wanted"), [("app", "1001:1002"), ("root", "0:0"), ("4242", "4242")]
)
def test_a_user_is_looked_up_in_the_base(tmp_path: Path, user: str, wanted: str) -> None:
    built, store = built_on(tmp_path, foreign_image(), user=user)
    assert config(store, built)["config"]["User"] == wanted


def test_a_list_of_users_of_ours_counts_instead_of_the_bases(tmp_path: Path) -> None:
    files = [{"from": "passwd", "to": "/etc/passwd"}]
    own = {"passwd": "app:x:7:8::/:/bin/sh\n"}
    built, store = built_on(tmp_path, foreign_image(), user="app", files=files, own=own)
    assert config(store, built)["config"]["User"] == "7:8"


@pytest.mark.parametrize(
    "layers",
    [
        (system_layer(),),
        (layer_of(Thing("bin/sh", b"")),),
        (system_layer(), layer_of(Thing("etc/.wh.passwd"))),
        (system_layer(), layer_of(Thing("etc/passwd", b"broken\n:::\nnobody2:x:a:b\n"))),
    ],
    ids=["unknown", "no list", "list removed", "list unreadable"],
)
def test_a_user_that_cannot_be_found_is_refused(tmp_path: Path, layers: tuple[Layer, ...]) -> None:
    with pytest.raises(SpecInvalid, match="user: 'nobody2'"):
        built_on(tmp_path, foreign_image(*layers), user="nobody2")


def test_a_file_of_ours_covers_one_of_the_base(tmp_path: Path) -> None:
    built, store = built_on(
        tmp_path, foreign_image(), files=[{"from": "tool", "to": "/usr/bin/tool"}]
    )
    rows = {r.path: r for r in store.contents(built.layers[-1].record)}
    assert rows["usr/bin/tool"].size_bytes == len("new\n")


def test_folders_above_our_files_keep_the_bases_owner_and_mode(tmp_path: Path) -> None:
    files = [{"from": "tool", "to": "/home/app/tool"}, {"from": "tool", "to": "/srv/tool"}]
    built, store = built_on(tmp_path, foreign_image(), files=files)
    with tarfile.open(store.blob_path(built.layers[-1].record.digest)) as archive:
        folders = {m.name: (m.mode, m.uid, m.gid) for m in archive if m.isdir()}
    assert folders["home/app"] == (0o750, 1001, 1002)
    assert folders["srv"] == (0o1777, 0, 0)


def test_an_owner_with_a_large_number_is_kept_and_the_layer_stays_readable(tmp_path: Path) -> None:
    owned = Thing("srv/big", kind=tarfile.DIRTYPE, mode=0o750, uid=3_000_000, gid=4_000_000_000)
    image = foreign_image(system_layer(), layer_of(owned))
    files = [{"from": "tool", "to": "/srv/big/tool"}]
    built, store = built_on(tmp_path, image, files=files)
    blob = store.blob_path(built.layers[-1].record.digest)
    with tarfile.open(blob) as archive:
        members = {m.name: (m.mode, m.uid, m.gid) for m in archive}
    assert members["srv/big"] == (0o750, 3_000_000, 4_000_000_000)
    assert "srv/big/tool" in members
    listed = subprocess.run(["tar", "-tzf", blob], capture_output=True, text=True, check=True)
    assert "srv/big/tool" in listed.stdout.split()


def test_a_base_that_belongs_to_no_possible_user_is_refused(tmp_path: Path) -> None:
    owned = Thing("srv/big", kind=tarfile.DIRTYPE, uid=2**32)
    with pytest.raises(CorruptArchive, match="which is not a user"):
        built_on(tmp_path, foreign_image(system_layer(), layer_of(owned)))


def plain_base() -> tuple[ForeignImage, bytes]:
    """A base whose layer is not packed, and a forged layer of the same size."""
    tar = gzip.decompress(system_layer().blob)
    image = foreign_image(Layer(tar, f"sha256:{hashlib.sha256(tar).hexdigest()}", PLAIN_LAYER))
    return image, tar.replace(b":1001:1002:", b":0000:0000:")


def test_a_planted_layer_of_a_base_is_fetched_again(tmp_path: Path) -> None:
    image, forged = plain_base()
    checkout = checkout_on(tmp_path, image, user="app")
    store = open_store(tmp_path / "store")
    place = store.blob_path(image.layers[0].described["digest"])
    place.write_bytes(forged)
    built = build(checkout, store, tmp_path / "mirror", "mine")[0]
    assert place.read_bytes() == image.layers[0].blob
    assert config(store, built)["config"]["User"] == "1001:1002"


def test_a_layer_of_a_base_that_changed_since_is_not_believed(tmp_path: Path) -> None:
    image, forged = plain_base()
    checkout = checkout_on(tmp_path, image, user="app")
    store = open_store(tmp_path / "store")
    build(checkout, store, tmp_path / "mirror", "mine")
    assert len(forged) == len(image.layers[0].blob)
    store.blob_path(image.layers[0].described["digest"]).write_bytes(forged)
    (checkout.folder("mine") / "tool").write_text("another")
    with pytest.raises(StoreDamaged, match="does not match its d"):
        build(checkout, store, tmp_path / "mirror", "mine")


@pytest.mark.parametrize(
    ("to", "message"),
    [("/bin/mine", "below /bin, a symlink"), ("/home", "would replace /home, a dir")],
)
def test_what_would_hide_a_part_of_the_base_is_refused(
    tmp_path: Path, to: str, message: str
) -> None:
    with pytest.raises(SpecInvalid, match=message):
        built_on(tmp_path, foreign_image(), files=[{"from": "tool", "to": to}])


def test_a_folder_that_the_base_removed_is_made_anew(tmp_path: Path) -> None:
    gone = layer_of(Thing("home/.wh.app"))
    image = foreign_image(system_layer(), gone)
    built, store = built_on(tmp_path, image, files=[{"from": "tool", "to": "/home/app/tool"}])
    rows = {r.path: r for r in store.contents(built.layers[-1].record)}
    assert rows["home/app"].mode == 0o755


PYTHON = {"python": {"requirements": ["pkg==1.0"]}}


def with_wheel(place: Path, image: ForeignImage, **more: Any) -> tuple[Built, Store]:
    wheel = make_wheel(place / "mirror", "pkg")
    return built_on(place, image, wheels=[wheel], **{**PYTHON, **more})


@pytest.mark.parametrize(
    ("layer", "home"),
    [
        (system_layer(), "/usr/bin"),
        (
            layer_of(
                Thing("usr/local/bin/python3.11.7", b"\x7fELF", 0o755),
                link("usr/local/bin/python3.11", "python3.11.7"),
            ),
            "/usr/local/bin",
        ),
    ],
)
def test_wheels_stand_on_the_bases_own_python(tmp_path: Path, layer: Layer, home: str) -> None:
    built, store = with_wheel(tmp_path, foreign_image(layer))
    rows = {r.path: r for r in store.contents(built.layers[-1].record)}
    assert rows["opt/venv/bin/python"].target == f"{home}/python3.11"
    assert "PATH=/opt/venv/bin:/usr/local/bin:/usr/bin" in config(store, built)["config"]["Env"]


def test_our_own_PATH_wins_over_all(tmp_path: Path) -> None:
    built, store = with_wheel(tmp_path, foreign_image(), env={"PATH": "/opt/venv/bin"})
    assert "PATH=/opt/venv/bin" in config(store, built)["config"]["Env"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((layer_of(folder("opt")),), "no python3.11"),
        ((system_layer(), layer_of(Thing("usr/bin/.wh.python3.11"))), "no python3.11"),
        ((layer_of(link("usr/bin/python3.11", "gone")),), "no python3.11"),
        ((system_layer(Thing("lib/ld-musl-x86_64.so.1", b"")),), "musl"),
        ((system_layer(Thing("lib/x86_64-linux-gnu/libc-2.31.so", b"")),), "has glibc 2.31"),
        ((system_layer(Thing("lib64/libc-2.17.so", b"")),), "has glibc 2.17"),
        ((system_layer(folder("opt/venv")),), "two environments would mix"),
        ((system_layer(), layer_of(folder("opt", 0o700))), "a plain folder"),
        ((system_layer(), layer_of(Thing(".wh.opt"), link("opt", "srv"))), "a symlink of mode"),
    ],
)
def test_wheels_that_do_not_fit_the_base_are_refused_with_a_reason(
    tmp_path: Path, layers: tuple[Layer, ...], message: str
) -> None:
    with pytest.raises(SpecInvalid, match=f"mine: python: .*{message}"):
        with_wheel(tmp_path, foreign_image(*layers))


def test_an_image_of_ours_may_stand_on_one_that_has_a_foreign_base(tmp_path: Path) -> None:
    child = Image(
        {
            "name": "child",
            "summary": "one more image on top",
            "base": "mine",
            "platforms": [AMD64],
            "files": [{"from": "tool", "to": "/opt/child"}],
        },
        files={"tool": "child\n"},
    )
    checkout = checkout_on(tmp_path, image := foreign_image(), child)
    store = open_store(tmp_path / "store")
    built = build(checkout, store, tmp_path / "mirror", "child")[0]
    assert [x.title for x in built.layers] == ["base layer 1", "mine files", "child files"]
    made = config(store, built)
    assert made["config"]["User"] == "app"
    assert made["config"]["Labels"]["org.opencontainers.image.base.name"] == "mine"
    assert built.layers[0].record.digest == image.layers[0].described["digest"]


@pytest.mark.parametrize("field", [{"debs": ["tool"]}, {"gates": ["smem"]}])
@pytest.mark.parametrize("on_child", [False, True])
def test_what_needs_our_own_root_is_refused_before_anything_is_done(
    tmp_path: Path, field: dict[str, Any], on_child: bool
) -> None:
    child = {
        "name": "child",
        "summary": "one more image on top",
        "base": "mine",
        "platforms": [AMD64],
        **(field if on_child else {}),
    }
    checkout = checkout_on(tmp_path, foreign_image(), Image(child), **({} if on_child else field))
    with pytest.raises(SpecInvalid, match=f"{next(iter(field))}: .* a foreign base"):
        plan_image(checkout, "child", AMD64)


def test_a_history_that_does_not_fit_is_not_taken_over(tmp_path: Path) -> None:
    built, store = built_on(tmp_path, foreign_image(history=[{"created_by": "lies"}] * 3))
    steps = [h["created_by"] for h in config(store, built)["history"]]
    assert steps == ["sm120: base layer 1", "sm120: mine files"]


def test_plain_layers_and_dockers_names_are_taken(tmp_path: Path) -> None:
    tar = tar_of(Thing("etc/a", b"a"))
    docker = "application/vnd.docker"
    plain = Layer(tar, gzipped(tar).diff_id, f"{docker}.image.rootfs.diff.tar")
    packed = gzipped(tar_of(Thing("etc/b", b"b")), f"{docker}.image.rootfs.diff.tar.gzip")
    kind = f"{docker}.distribution.manifest.v2+json"
    built, store = built_on(tmp_path, foreign_image(plain, packed, manifest={"mediaType": kind}))
    kinds = [x["mediaType"] for x in json.loads(store.read_blob(built.digest))["layers"]]
    oci = "application/vnd.oci.image.layer.v1.tar"
    assert kinds == [oci, f"{oci}+gzip", f"{oci}+gzip"]


@pytest.mark.parametrize(
    "media_type", [ZSTD_LAYER, "application/vnd.docker.image.rootfs.diff.tar.zstd"]
)
def test_zstd_layers_are_read_and_stay_as_they_are(tmp_path: Path, media_type: str) -> None:
    packed = replace(zstd_packed(tar_of(Thing("etc/a", b"a")), frames=2), media_type=media_type)
    built, store = built_on(tmp_path, foreign_image(system_layer(), packed))
    layers = json.loads(store.read_blob(built.digest))["layers"]
    assert layers[1]["mediaType"] == ZSTD_LAYER
    assert store.read_blob(layers[1]["digest"]) == packed.blob


def test_one_layer_twice_is_one_blob(tmp_path: Path) -> None:
    layer = layer_of(Thing("etc/a", b"a"))
    built, _ = built_on(tmp_path, foreign_image(layer, layer))
    assert len(built.layers) == 3


BAD_TAR = tar_of(Thing("etc/a", b"a" * 2000))


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (layer_of(Thing("../etc/passwd", b"x")), HostileArchive, "leaves the image"),
        (layer_of(Thing("a/../../b", b"x")), HostileArchive, "leaves the image"),
        (
            layer_of(Thing("a", kind=b"1", target="../../etc/shadow")),
            HostileArchive,
            "leaves the image",
        ),
        (layer_of(Thing("etc/.wh..")), HostileArchive, "removes no file"),
        (gzipped(BAD_TAR[:1500]), CorruptArchive, "ends too early"),
        (gzipped(BAD_TAR[:700] + b"!" + BAD_TAR[701:]), BaseUnusable, "unpacks to"),
        (gzipped(b"x" * 1024), CorruptArchive, "not a number"),
        (Layer(b"no gzip at all", "sha256:" + "0" * 64), CorruptArchive, "cannot be inflated"),
        (
            replace(gzipped(BAD_TAR), blob=gzipped(BAD_TAR).blob[:-9]),
            CorruptArchive,
            "ends too early",
        ),
        (
            replace(gzipped(BAD_TAR), blob=gzipped(BAD_TAR).blob + b"more"),
            CorruptArchive,
            "cannot be inflated",
        ),
        (gzipped(BAD_TAR + b"more".ljust(512)), CorruptArchive, "bytes follow"),
        (replace(gzipped(BAD_TAR), media_type=ZSTD_LAYER), CorruptArchive, "cannot be inflated"),
        (
            replace(zstd_packed(BAD_TAR), blob=zstd_packed(BAD_TAR).blob[:-20]),
            CorruptArchive,
            "ends too early",
        ),
        (
            replace(zstd_packed(BAD_TAR), diff_id="sha256:" + "1" * 64),
            BaseUnusable,
            ", but its config names",
        ),
        (
            replace(gzipped(BAD_TAR), diff_id="sha256:" + "1" * 64),
            BaseUnusable,
            ", but its config names",
        ),
    ],
)
def test_a_layer_that_is_hostile_or_broken_is_refused(
    tmp_path: Path, layer: Layer, error: type[Exception], message: str
) -> None:
    if layer.diff_id == gzipped(BAD_TAR[:700] + b"!" + BAD_TAR[701:]).diff_id:
        layer = replace(layer, diff_id=gzipped(BAD_TAR).diff_id)
    with pytest.raises(error, match=message):
        built_on(tmp_path, foreign_image(layer))


def test_a_name_of_endless_length_is_refused(tmp_path: Path) -> None:
    tar = tar_of(Thing("a", pax={"path": "x" * (5 << 20)}))
    with pytest.raises(HostileArchive, match="pax header"):
        built_on(tmp_path, foreign_image(gzipped(tar)))


def test_without_network_a_base_in_the_store_is_enough(tmp_path: Path) -> None:
    image = foreign_image()
    checkout = checkout_on(tmp_path, image)
    store = open_store(tmp_path / "store")
    first = build(checkout, store, tmp_path / "mirror", "mine")[0]
    (checkout.folder("mine") / "tool").write_text("edited\n")
    second = build(checkout, store, tmp_path / "nowhere", "mine")[0]
    assert first.digest != second.digest


def test_a_trimmed_store_still_has_what_the_next_build_needs(tmp_path: Path) -> None:
    checkout = checkout_on(tmp_path, foreign_image())
    store = open_store(tmp_path / "store")
    build(checkout, store, tmp_path / "mirror", "mine")
    remove_files(unreachable(store))
    assert damaged(store, lambda n: None) == []
    (checkout.folder("mine") / "tool").write_text("edited\n")
    build(checkout, store, tmp_path / "nowhere", "mine")


def test_without_network_a_missing_base_is_one_clear_error(tmp_path: Path) -> None:
    checkout = checkout_on(tmp_path, image := foreign_image())
    with pytest.raises(
        OfflineMiss, match=f"{image.digest}: this part of the base image is not in the store"
    ):
        build(checkout, open_store(tmp_path / "store"), tmp_path / "nowhere", "mine")


def test_without_network_a_missing_layer_is_one_clear_error(tmp_path: Path) -> None:
    checkout = checkout_on(tmp_path, image := foreign_image())
    digest = str(image.layers[0].described["digest"])
    (tmp_path / "mirror" / "blobs" / "sha256" / digest.removeprefix("sha256:")).unlink()
    with pytest.raises(OfflineMiss, match="1 of its 2 blobs are not in the store: layer 1 of 1"):
        build(checkout, open_store(tmp_path / "store"), tmp_path / "mirror", "mine")


@pytest.mark.parametrize("n_bytes", [0, 1])
def test_a_folder_with_other_bytes_under_the_right_name_helps_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], n_bytes: int
) -> None:
    checkout = checkout_on(tmp_path, image := foreign_image())
    digest = str(image.layers[0].described["digest"])
    path = tmp_path / "mirror" / "blobs" / "sha256" / digest.removeprefix("sha256:")
    path.write_bytes(b"x" * (path.stat().st_size - n_bytes))
    store = open_store(tmp_path / "store")
    with pytest.raises(OfflineMiss):
        build(checkout, store, tmp_path / "mirror", "mine")
    assert f"{path}, layer 1 of 1 of the base image, is damaged" in capsys.readouterr().err
    assert not store.blob_path(digest).exists()


def test_a_plan_says_what_a_base_will_cost(tmp_path: Path) -> None:
    checkout = checkout_on(tmp_path, image := foreign_image())
    store = open_store(tmp_path / "store")
    plan = plan_image(checkout, "mine", AMD64)
    work = work_for([plan], store)
    assert work.base_bytes == len(image.manifest) + sum(map(len, image.blobs.values()))
    assert [str(b) for b in work.bases] == [f"{REPOSITORY}@{image.digest}"]
    build(checkout, store, tmp_path / "mirror", "mine")
    assert work_for([plan], store).bases == ()


@pytest.mark.parametrize("change", ["config", "layers", "manifest"])
def test_a_lock_that_was_written_by_hand_does_not_stand_against_the_manifest(
    tmp_path: Path, change: str
) -> None:
    image = foreign_image()
    store = open_store(tmp_path / "lock-store")
    pin = pinned(tmp_path / "mirror", image, store)
    other = foreign_image(layer_of(Thing("evil", b"")))
    stolen = pinned(tmp_path / "mirror", other, store)
    forged = pin.model_copy(update={change: getattr(stolen, change)})
    mine = Image(spec_on(image), files={"tool": "x"}, base_image=forged)
    checkout = make_checkout(tmp_path / "checkout", mine)
    with pytest.raises((BaseUnusable, LockEdited), match=r"than the lock|not the one"):
        build(checkout, open_store(tmp_path / "store"), tmp_path / "mirror", "mine")


def test_a_base_that_is_locked_but_not_asked_for_is_refused(tmp_path: Path) -> None:
    image = foreign_image()
    pin = pinned(tmp_path / "mirror", image, open_store(tmp_path / "lock-store"))
    spec = {**spec_on(image), "debian": {}}
    del spec["base"]
    checkout = make_checkout(tmp_path / "checkout", Image(spec, files={"tool": ""}, base_image=pin))
    with pytest.raises(LockEdited, match="not the one in the spec"):
        plan_image(checkout, "mine", AMD64)


@pytest.mark.parametrize(
    "changes",
    [
        {"Env": ["NOVALUE"]},
        {"Env": ["A=\0"]},
        {"Env": {"A": "B"}},
        {"User": "app; rm -rf /"},
        {"WorkingDir": "relative"},
        {"WorkingDir": "/a/../../b"},
        {"Volumes": {"../data": {}}},
        {"ExposedPorts": {"80/http": {}}},
        {"Entrypoint": "sh -c evil"},
        {"Cmd": [1]},
        {"StopSignal": "SIG TERM"},
    ],
)
def test_a_config_that_is_not_sound_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    field = next(iter(changes))
    with pytest.raises(BaseUnusable, match=f"config.{field}"):
        built_on(tmp_path, foreign_image(config={**SETTINGS, **changes}))


def test_a_config_that_says_nothing_is_enough(tmp_path: Path) -> None:
    image = foreign_image(config=None, history=None)
    built, store = built_on(tmp_path, image)
    runs = config(store, built)["config"]
    assert (runs["Env"], runs["WorkingDir"], "User" in runs) == ([], "/", False)
