"""Files and layouts are read, not believed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.oci.document import OCI_INDEX
from pipeline.artifacts.oci.layout import export_layout
from pipeline.core.errors import EvidenceBroken, PipelineError, RecordInvalid, UnknownImage
from pipeline.core.model import canonical_json, sha256_of
from pipeline.evidence.verify.artifact import open_file, open_layout, read_bounded
from pipeline.evidence.verify.evidence import MOST_FILES, beside, gather_envelopes
from pipeline.evidence.verify.verdict import Verdict
from tests.unit.verify.world import World

Json = dict[str, Any]


@pytest.fixture
def layout(world: World, tmp_path: Path) -> Path:
    """The image as a folder whose files may be changed."""
    folder = tmp_path / "layout"
    export_layout(world.store, world.built.record, folder)
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
    return folder


def blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def manifest_of(folder: Path) -> tuple[Json, Json]:
    index = json.loads((folder / "index.json").read_bytes())
    return index, json.loads(blob(folder, index["manifests"][0]["digest"]).read_bytes())


def rewrite(folder: Path, change: Callable[[Json], Any]) -> None:
    """Another manifest under the index, with a true digest."""
    index, manifest = manifest_of(folder)
    change(manifest)
    data = canonical_json(manifest)
    index["manifests"][0] |= {"digest": sha256_of(data), "size": len(data)}
    blob(folder, sha256_of(data)).write_bytes(data)
    (folder / "index.json").write_bytes(canonical_json(index))


def rewrite_config(folder: Path, data: bytes) -> None:
    digest = sha256_of(data)
    blob(folder, digest).write_bytes(data)
    rewrite(folder, lambda m: m["config"].update(digest=digest, size=len(data)))


def grow_index(folder: Path) -> None:
    (folder / "index.json").write_bytes(b" " * (5 << 20))


def test_a_layout_is_the_image_that_was_built(world: World, layout: Path) -> None:
    image = open_layout(layout)
    assert (image.digest, image.layers) == (world.artifact.digest, world.artifact.layers)
    assert open_layout(layout, "linux/amd64") == image
    assert world.walk(artifact=image).node.verdict is Verdict.VALID


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert open_file(tmp_path / "x").digest == sha256_of(b"abc")


def layer_path(folder: Path) -> Path:
    return blob(folder, manifest_of(folder)[1]["layers"][0]["digest"])


def truncate(folder: Path) -> None:
    path = layer_path(folder)
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = layer_path(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link_blob(folder: Path) -> None:
    path = layer_path(folder)
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def link_folder(folder: Path) -> None:
    (folder / "blobs").rename(folder.parent / "blobs")
    (folder / "blobs").symlink_to(folder.parent / "blobs")


def link_index(folder: Path) -> None:
    (folder / "index.json").rename(folder.parent / "index.json")
    (folder / "index.json").symlink_to(folder.parent / "index.json")


def pipe_blob(folder: Path) -> None:
    path = layer_path(folder)
    path.unlink()
    os.mkfifo(path)


def edit_manifest(folder: Path) -> None:
    path = blob(folder, manifest_of(folder)[0]["manifests"][0]["digest"])
    path.write_bytes(path.read_bytes().replace(b"engine", b"engima"))


def edit_index(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_bytes())
        index["manifests"][0] |= changes
        (folder / "index.json").write_bytes(canonical_json(index))

    return change


def extra_layer(folder: Path) -> None:
    rewrite(folder, lambda m: m["layers"].append(m["layers"][0]))


def doubled(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_bytes())
    index["manifests"] *= 2
    (folder / "index.json").write_bytes(canonical_json(index))


BAD: dict[str, tuple[Callable[[Path], None], type[PipelineError], str]] = {
    "truncated layer": (truncate, EvidenceBroken, "bytes instead of"),
    "flipped bit": (flip, EvidenceBroken, "is really sha256:"),
    "layer gone": (lambda f: layer_path(f).unlink(), EvidenceBroken, "is missing: there is no /"),
    "layer behind a link": (link_blob, EvidenceBroken, "is a link or not a plain file"),
    "folder behind a link": (link_folder, EvidenceBroken, "blobs: is a link"),
    "index behind a link": (link_index, EvidenceBroken, "index.json: is a link"),
    "layer is a pipe": (pipe_blob, EvidenceBroken, "is a link or not a plain file"),
    "edited manifest": (edit_manifest, EvidenceBroken, "is really"),
    "manifest of another size": (edit_index(size=1), EvidenceBroken, "instead of 1"),
    "digest that is a path": (edit_index(digest="sha256:../x"), RecordInvalid, "digest"),
    "index with a strange field": (edit_index(urls=["x"]), RecordInvalid, "unknown field 'urls'"),
    "extra layer": (extra_layer, EvidenceBroken, "layers, but 4 in its config"),
    "no layers": (lambda f: rewrite(f, lambda m: m["layers"].clear()), RecordInvalid, "layers"),
    "layer of another kind": (
        lambda f: rewrite(f, lambda m: m["layers"][0].update(mediaType="text/plain")),
        EvidenceBroken,
        "is a text/plain",
    ),
    "config of another kind": (
        lambda f: rewrite(f, lambda m: m["config"].update(mediaType="text/plain")),
        EvidenceBroken,
        "its config is a text/plain",
    ),
    "config without diffIDs": (
        lambda f: rewrite_config(f, b"{}"),
        RecordInvalid,
        "names no diffIDs",
    ),
    "config with keys twice": (
        lambda f: rewrite_config(f, b'{"a":1,"a":2}'),
        RecordInvalid,
        "appears twice",
    ),
    "index too large": (grow_index, RecordInvalid, "larger than"),
    "two images": (doubled, UnknownImage, "holds 2 images"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_layout_is_refused(layout: Path, name: str) -> None:
    change, kind, message = BAD[name]
    change(layout)
    with pytest.raises(kind) as refused:
        open_layout(layout)
    assert message in str(refused.value)


def config_path(folder: Path) -> Path:
    return blob(folder, manifest_of(folder)[1]["config"]["digest"])


def manifest_path(folder: Path) -> Path:
    return blob(folder, manifest_of(folder)[0]["manifests"][0]["digest"])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


# each part, gone and cut short: what it is called
PARTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "layer": (layer_path, r"layout: layer 1 of 4 \(2 Debian packages\) of engine is"),
    "config": (config_path, "layout: config of engine is"),
    "manifest": (manifest_path, "layout: manifest is"),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    ("change", "how"),
    [
        (Path.unlink, "missing: there is no /"),
        (cut, "damaged: sha256:[0-9a-f]+ has [0-9]+ bytes instead of [0-9]+$"),
    ],
)
def test_a_part_that_is_wrong_is_named_by_what_it_is(
    layout: Path, name: str, change: Callable[[Path], None], how: str
) -> None:
    find, what = PARTS[name]
    change(find(layout))
    with pytest.raises(EvidenceBroken, match=f"^{what} {how}") as refused:
        open_layout(layout)
    assert "`sm120 image export`" in refused.value.hint


def test_all_wrong_layers_are_named_but_not_endlessly(layout: Path) -> None:
    layers = [x["digest"] for x in manifest_of(layout)[1]["layers"]]
    for digest in layers:
        blob(layout, digest).unlink()
    with pytest.raises(EvidenceBroken) as refused:
        open_layout(layout)
    named = str(refused.value).split("; ")
    assert [text.split(" (")[0] for text in named] == [
        "layout: layer 1 of 4",
        "layer 2 of 4",
        "layer 3 of 4",
        "and 1 more",
    ]


def test_a_layout_without_its_index_says_so(layout: Path) -> None:
    (layout / "index.json").unlink()
    with pytest.raises(EvidenceBroken, match=r"^layout: index\.json is missing$"):
        open_layout(layout)


def test_an_index_that_is_no_json_is_told_what_to_do(layout: Path) -> None:
    (layout / "index.json").write_bytes(b"x")
    with pytest.raises(RecordInvalid, match=r"^layout/index\.json: is not acceptable JSON") as bad:
        open_layout(layout)
    assert "Copy the folder again" in bad.value.hint


def nest(folder: Path, levels: int) -> None:
    """The index behind another one."""
    for _ in range(levels):
        data = (folder / "index.json").read_bytes()
        blob(folder, sha256_of(data)).write_bytes(data)
        inner = {"mediaType": OCI_INDEX, "digest": sha256_of(data), "size": len(data)}
        (folder / "index.json").write_bytes(
            canonical_json({"schemaVersion": 2, "manifests": [inner]})
        )


def test_an_index_of_platforms_is_followed_once(world: World, layout: Path) -> None:
    nest(layout, 1)
    assert open_layout(layout, "linux/amd64").digest == world.artifact.digest
    nest(layout, 1)
    with pytest.raises(UnknownImage, match="0 images"):
        open_layout(layout)


def test_an_index_of_platforms_is_checked_too(layout: Path) -> None:
    nest(layout, 1)
    inner = json.loads((layout / "index.json").read_bytes())["manifests"][0]["digest"]
    blob(layout, inner).write_bytes(blob(layout, inner).read_bytes().replace(b"amd64", b"arm64"))
    with pytest.raises(EvidenceBroken, match="is really"):
        open_layout(layout)


def test_a_layout_has_no_image_for_another_platform(layout: Path) -> None:
    with pytest.raises(UnknownImage, match="0 images for linux/arm64"):
        open_layout(layout, "linux/arm64")


def test_a_re_signed_image_with_another_layer_is_not_the_recorded_one(
    world: World, layout: Path
) -> None:
    """Manifest and config agree, but nobody recorded this image."""
    manifest = manifest_of(layout)[1]
    config = json.loads(blob(layout, manifest["config"]["digest"]).read_bytes())
    config["rootfs"]["diff_ids"].append(config["rootfs"]["diff_ids"][0])
    extra_layer(layout)
    rewrite_config(layout, canonical_json(config))
    node = world.walk(artifact=open_layout(layout)).node
    assert node.verdict is Verdict.BROKEN
    assert "not about this" in node.culprit().message


def test_evidence_lies_beside_what_it_is_about(tmp_path: Path) -> None:
    folder = tmp_path / "layout"
    (folder / "records").mkdir(parents=True)
    file = tmp_path / "report.html"
    file.write_bytes(b"")
    assert beside(file) == []
    (tmp_path / "report.html.dsse.json").write_bytes(b"{}")
    (tmp_path / "layout.records").mkdir()
    assert beside(file) == [tmp_path / "report.html.dsse.json"]
    assert beside(folder) == [tmp_path / "layout.records", folder / "records"]


def test_evidence_behind_a_link_is_not_read(world: World, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(world.signed("provenance").dump())
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "a.dsse.json").symlink_to(outside)
    items = gather_envelopes([tmp_path / "bundle"])
    assert items[0].envelope is None
    node = world.walk(items).node
    assert node.verdict is Verdict.BROKEN
    assert "is a link" in node.culprit().message


def test_a_files_name_cannot_colour_the_terminal(world: World, tmp_path: Path) -> None:
    (tmp_path / "\x1b[32mvalid\n.dsse.json").write_bytes(b"{")
    (items,) = gather_envelopes([tmp_path])
    assert items.name == " [32mvalid .dsse.json"
    assert "\x1b" not in items.error
    (tmp_path / "\x1b[2J.dsse.json").symlink_to("x")
    assert not any("\x1b" in x.name + x.error for x in gather_envelopes([tmp_path]))


def test_named_evidence_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(EvidenceBroken, match="no such evidence"):
        gather_envelopes([tmp_path / "x"])


def test_a_flood_of_evidence_is_not_read(tmp_path: Path) -> None:
    for number in range(MOST_FILES + 1):
        (tmp_path / f"{number}.dsse.json").touch()
    with pytest.raises(RecordInvalid, match="more than"):
        gather_envelopes([tmp_path])


def test_a_file_is_gathered_by_its_name(world: World, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(world.envelopes()["provenance"].dump())
    assert gather_envelopes([path])[0].envelope == world.envelopes()["provenance"]


def test_a_folder_is_no_small_file(tmp_path: Path) -> None:
    with pytest.raises(EvidenceBroken, match="cannot be read"):
        read_bounded(tmp_path)


@pytest.mark.parametrize("odd", ["pipe", "endless", "link to endless"])
def test_what_has_no_last_byte_is_not_read(tmp_path: Path, odd: str) -> None:
    path = Path("/dev/zero") if odd == "endless" else tmp_path / "odd"
    if odd == "pipe":
        os.mkfifo(path)
    elif odd == "link to endless":
        path.symlink_to("/dev/zero")
    with pytest.raises(EvidenceBroken, match="is not a plain file"):
        open_file(path)


@pytest.mark.parametrize("chosen", [None, "linux/arm64"])
def test_an_image_listed_for_another_platform_than_its_own_is_refused(
    layout: Path, chosen: str | None
) -> None:
    index, _ = manifest_of(layout)
    index["manifests"][0]["platform"] = {"architecture": "arm64", "os": "linux"}
    (layout / "index.json").write_bytes(canonical_json(index))
    with pytest.raises(EvidenceBroken, match="is listed for linux/arm64, but is for linux/amd64"):
        open_layout(layout, chosen)


@pytest.mark.parametrize("count", [0, 2])
def test_a_platform_is_asked_for_only_where_it_helps(layout: Path, count: int) -> None:
    index, _ = manifest_of(layout)
    index["manifests"] = index["manifests"] * count
    (layout / "index.json").write_bytes(canonical_json(index))
    with pytest.raises(UnknownImage, match=f"holds {count} images") as refused:
        open_layout(layout)
    assert "--platform" not in refused.value.hint
