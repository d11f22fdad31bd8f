"""The shipped wishes, locks and schemas agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.build.plan import plan_image
from pipeline.lock.model import current_lock
from pipeline.wish.image import ImageWish, PatchSeries
from pipeline.wish.load import Checkout, schema

CHECKOUT = Checkout(Path(__file__).resolve().parents[3])
SHIPPED = [(n, p) for n in CHECKOUT.images() for p in CHECKOUT.wish(n).platforms]


@pytest.mark.parametrize(("name", "platform"), SHIPPED)
def test_a_shipped_lock_answers_its_wish(name: str, platform: str) -> None:
    assert current_lock(CHECKOUT, CHECKOUT.wish(name), platform).pins or name == "debian-python"


@pytest.mark.parametrize(("name", "platform"), SHIPPED)
def test_a_shipped_image_stays_under_a_hundred_layers(name: str, platform: str) -> None:
    assert len(plan_image(CHECKOUT, name, platform).all_layers()) < 98


@pytest.mark.parametrize("path", sorted((CHECKOUT.root / "lockfiles").rglob("*.*")), ids=str)
def test_no_lock_names_a_place(path: Path) -> None:
    assert not re.search(r"://|index-url", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("file", "model"), [("image.schema.json", ImageWish), ("series.schema.json", PatchSeries)]
)
def test_the_schemas_for_editors_are_those_of_the_code(
    file: str, model: type[ImageWish] | type[PatchSeries]
) -> None:
    assert (CHECKOUT.root / "images" / file).read_text(encoding="utf-8") == schema(model)
