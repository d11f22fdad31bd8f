from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipeline.core.errors import NoCheckout, SpecInvalid, UnknownImage
from pipeline.images.spec.checkout import Checkout, find_checkout
from pipeline.images.spec.image import ImageSpec
from tests.unit.support import AMD64, ROOT, make_checkout, tiny_spec, write_spec


def test_an_unknown_image_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownImage, match=r"no image 'tinny' \(there are: tiny\)"):
        make_checkout(tmp_path).spec("tinny")
    with pytest.raises(UnknownImage, match="there are: none"):
        Checkout(tmp_path / "empty").spec("tiny")


@pytest.mark.parametrize("name", ["", ".", "..", "../images/tiny", "tiny/", "/etc"])
def test_a_path_is_no_image(tmp_path: Path, name: str) -> None:
    checkout = make_checkout(tmp_path)
    with pytest.raises((UnknownImage, SpecInvalid)):
        checkout.spec(name)


def test_a_name_that_is_not_the_folders_is_refused(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    checkout.folder("tiny").rename(checkout.folder("small"))
    with pytest.raises(SpecInvalid, match="is 'tiny', its folder is 'small'"):
        checkout.spec("small")


def with_bases(root: Path, **bases: str | None) -> Checkout:
    checkout = Checkout(root)
    for name, base in bases.items():
        debian = None if base else {"suite": "bookworm"}
        write_spec(checkout, tiny_spec(name, base=base, debian=debian))
    return checkout


def test_a_chain_begins_at_the_root(tmp_path: Path) -> None:
    checkout = with_bases(tmp_path, a=None, b="a", c="b")
    assert [w.name for w in checkout.chain("c", AMD64)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "bases", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "b"}]
)
def test_a_base_that_leads_back_is_refused(tmp_path: Path, bases: dict[str, str]) -> None:
    with pytest.raises(SpecInvalid, match="its base images form a loop"):
        with_bases(tmp_path, **bases).chain("a", AMD64)


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownImage, match="'gone'"):
        with_bases(tmp_path, a="gone").chain("a", AMD64)


def test_the_checkout_is_found_from_any_folder_in_it(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    assert find_checkout(checkout.folder("tiny")).root == tmp_path
    with pytest.raises(NoCheckout, match="not inside a checkout"):
        find_checkout(tmp_path.parent)


def test_the_shipped_specs_are_good() -> None:
    checkout = Checkout(ROOT)
    for name in checkout.images():
        for platform in checkout.spec(name).platforms:
            assert checkout.chain(name, platform)[-1].name == name
        assert checkout.series(checkout.spec(name)) is not None


def test_a_series_that_leads_out_of_the_checkout_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "series.yaml"
    outside.write_text("patches: []\n")
    folder = tmp_path / "checkout" / "images" / "one" / "patches"
    folder.mkdir(parents=True)
    (folder / "series.yaml").symlink_to(outside)
    spec = cast(ImageSpec, SimpleNamespace(name="one", patches="patches/series.yaml"))
    with pytest.raises(SpecInvalid, match=r"series\.yaml: is a link that leads out"):
        Checkout(tmp_path / "checkout").series(spec)
    (folder / "series.yaml").unlink()
    (folder / "own.yaml").write_text("patches: []\n")
    (folder / "series.yaml").symlink_to("own.yaml")
    assert Checkout(tmp_path / "checkout").series(spec).patches == []
