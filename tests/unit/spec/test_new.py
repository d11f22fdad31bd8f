"""Specs that are written for a user: each must be one that can be read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core.errors import SpecInvalid, UnknownImage
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import PatchSpec
from pipeline.images.spec.new import (
    add_to_series,
    copy_image,
    new_image,
    next_patch_name,
    with_patch,
)
from tests.makers import AMD64, patch_spec, root_image
from tests.makers import make_checkout as make

ENTRY: dict[str, Any] = patch_spec(file="0002-more.patch", files=[{"path": "pkg/a.py"}])
FORMS = {
    "an empty list": "# kept\npatches: []\n",
    "a list": "# kept\npatches:\n  - {file: a}  # kept, too\n",
    "a list that is not indented": "patches:\n- file: a\n  why: |\n    b\n",
    "a list without a last line end": "patches:\n  - {file: a}",
    "JSON": '{"patches": [{"file": "a"}]}\n',
    "JSON without any": '{"patches": []}',
}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make(tmp_path, root_image([]))


def one(**more: Any) -> PatchSpec:
    return PatchSpec.model_validate({**ENTRY, **more})


@pytest.mark.parametrize("form", FORMS)
def test_a_patch_is_added_last_and_nothing_else_changes(form: str) -> None:
    text = FORMS[form]
    before, after = yaml.safe_load(text)["patches"], with_patch(text, ENTRY)
    assert yaml.safe_load(after)["patches"] == [*before, ENTRY]
    assert after.count("# kept") == text.count("# kept")


@pytest.mark.parametrize("text", ["name: a\nenv: {}\n", "name: a", '{"name": "a"}\n'])
def test_the_first_patch_adds_the_series_as_the_last_field(checkout: Checkout, text: str) -> None:
    spec, path = checkout.spec("root").on(AMD64), checkout.folder("root") / "image.yaml"
    path.write_text(text)
    add_to_series(checkout, spec, one(file="0001-a.patch"), "first\n")
    added = yaml.safe_load(path.read_text())
    assert added == {**yaml.safe_load(text), "patches": "patches/series.yaml"}
    assert list(added)[-1] == "patches"


def test_a_new_image_is_read_back(checkout: Checkout) -> None:
    new_image(checkout, "mine", "root", [AMD64], "an image of my own", ["thing==1.0"])
    spec = checkout.spec("mine")
    assert (spec.base, spec.platforms) == ("root", [AMD64])
    assert spec.python is not None
    assert spec.python.requirements == ["thing==1.0"]


def test_all_mistakes_are_named_and_nothing_is_written(checkout: Checkout) -> None:
    with pytest.raises(SpecInvalid, match=r"name: .*; summary: .*; platforms\.0: "):
        new_image(checkout, "My Own", "root", ["windows"], "short", [])
    assert checkout.images() == ["root"]


def test_an_image_that_is_there_is_left_alone(checkout: Checkout) -> None:
    before = (checkout.folder("root") / "image.yaml").read_bytes()
    with pytest.raises(SpecInvalid, match="is there already"):
        new_image(checkout, "root", "root", [AMD64], "an image of my own", [])
    with pytest.raises(SpecInvalid, match="is there already"):
        copy_image(checkout, "root", "root")
    assert (checkout.folder("root") / "image.yaml").read_bytes() == before


def test_a_copy_has_its_own_name_and_all_files(checkout: Checkout) -> None:
    folder = checkout.folder("one")
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "run.sh").write_text("true\n")
    body = (checkout.folder("root") / "image.yaml").read_text()
    (folder / "image.yaml").write_text(yaml.safe_dump({**yaml.safe_load(body), "name": "one"}))
    copy_image(checkout, "two", "one")
    assert checkout.spec("two").summary == checkout.spec("one").summary
    assert sorted(p.name for p in checkout.folder("two").iterdir()) == ["image.yaml", "run.sh"]


def test_nothing_can_be_like_an_image_that_is_not_there(checkout: Checkout) -> None:
    with pytest.raises(UnknownImage, match="there is no image 'nope'"):
        copy_image(checkout, "two", "nope")


def test_the_first_patch_makes_the_series_and_the_second_is_added(checkout: Checkout) -> None:
    spec = checkout.spec("root").on(AMD64)
    written = add_to_series(checkout, spec, one(file="0001-a.patch"), "first\n")
    assert [p.name for p in written] == ["0001-a.patch", "series.yaml", "image.yaml"]
    spec = checkout.spec("root").on(AMD64)
    written = add_to_series(checkout, spec, one(file="0002-b.patch"), "second\n")
    assert [p.name for p in written] == ["0002-b.patch", "series.yaml"]
    assert [p.file for p in checkout.series(spec).patches] == ["0001-a.patch", "0002-b.patch"]


def test_patches_are_numbered_after_the_highest(tmp_path: Path) -> None:
    assert next_patch_name(tmp_path, "My fix!") == "0001-my-fix.patch"
    for name in ("0001-a.patch", "0007-b.patch", "pr-99.patch", "0009.txt"):
        (tmp_path / name).write_text("")
    assert next_patch_name(tmp_path, "__init__") == "0008-init.patch"
    assert next_patch_name(tmp_path, "…") == "0008-patch.patch"
