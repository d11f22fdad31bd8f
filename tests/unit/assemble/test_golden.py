from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import GoldenMismatch, SpecInvalid
from pipeline.images.assemble.golden import (
    Golden,
    GoldenImage,
    accept_golden,
    check_golden,
    read_golden,
)


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def image(letter: str = "a", **changes: Any) -> GoldenImage:
    fields = {
        "digest": digest(letter),
        "inputs": {"format": 1, "lock": digest("b"), "files": [digest("c")], "base": None},
        "layers": {"debs": digest("d"), "wheels": digest("e"), "patches": digest("f")},
    }
    return GoldenImage.model_validate({**fields, **changes})


GOLDEN = Golden(images={"x.amd64": image()})


def refused(got: GoldenImage, match: str, name: str = "x.amd64") -> str:
    with pytest.raises(GoldenMismatch, match=match) as caught:
        check_golden(GOLDEN, name, got)
    return caught.value.hint


def test_the_same_digest_is_fine_and_no_other() -> None:
    check_golden(GOLDEN, "x.amd64", image())
    refused(image("b"), "instead of")


def test_a_missing_golden_says_what_came_out() -> None:
    hint = refused(image(), f"no expected digest is committed; it came out as {digest('a')}", "y")
    assert "--accept" in hint


@pytest.mark.parametrize("got", [image(), image("9", inputs={"lock": digest("0")})])
def test_a_hint_to_accept_names_the_image(got: GoldenImage) -> None:
    golden = Golden() if got == image() else Golden(images={"a.b.arm64": image()})
    with pytest.raises(GoldenMismatch) as caught:
        check_golden(golden, "a.b.arm64", got)
    assert "`sm120 build a.b --accept`" in caught.value.hint


@pytest.mark.parametrize("name", ["x.arm64", "X.amd64", "x"])
def test_the_golden_of_another_image_does_not_count(name: str) -> None:
    refused(image(), "no expected digest", name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lock": digest("0")}, "changed: lock$"),
        ({"files": []}, "changed: files$"),
        ({"files": [digest("0")], "base": digest("1")}, "changed: files, base$"),
        ({"new": 1}, "changed: new$"),
    ],
)
def test_other_inputs_are_named(changes: dict[str, Any], named: str) -> None:
    hint = refused(image("9", inputs={**image().inputs, **changes}), named)
    assert "on purpose" in hint


def test_the_first_layer_that_differs_from_the_same_inputs_is_named() -> None:
    layers = {**image().layers, "wheels": digest("0"), "patches": digest("0")}
    hint = refused(image("9", layers=layers), "first layer that differs is 'wheels'")
    assert "defect" in hint


def test_a_layer_that_was_not_there_is_named() -> None:
    refused(image("9", layers={**image().layers, "more": digest("0")}), "differs is 'more'")


def test_the_same_layers_with_another_digest_point_at_the_config() -> None:
    refused(image("9"), "config or manifest differs")


def test_accepting_keeps_the_others_and_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "golden.yaml"
    assert read_golden(path) == Golden()
    accept_golden(path, "y.amd64", image("1"))
    accept_golden(path, "x.amd64", image("2"))
    accept_golden(path, "y.amd64", image("3"))
    images = read_golden(path).images
    assert images == {"x.amd64": image("2"), "y.amd64": image("3")}
    assert path.read_text().index("x.amd64") < path.read_text().index("y.amd64")
    assert {p.name for p in tmp_path.iterdir()} == {"golden.yaml", ".golden.lock"}


def test_accepting_the_same_again_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "golden.yaml"
    accept_golden(path, "x", image())
    before = path.read_bytes(), path.stat().st_mtime_ns
    accept_golden(path, "x", image())
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    "text",
    [
        "images: {x: {digest: latest, inputs: {}, layers: {}}}",
        "images: {x: {digest: 'sha256:abc', inputs: {}, layers: {}}}",
        "images: {x: {inputs: {}, layers: {}}}",
        "images: {}\nmore: 1\n",
        "images: [",
        "images: {}\nimages: {}\n",
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "golden.yaml").write_text(text)
    with pytest.raises(SpecInvalid, match=r"golden\.yaml"):
        read_golden(tmp_path / "golden.yaml")
