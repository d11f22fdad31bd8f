"""Every parser that a recipe names is judged, or its image says why it cannot be."""

from __future__ import annotations

import pytest

from pipeline.core.errors import GateInvalid
from pipeline.images.gate.parsers.cases import ParsersFile, read_parser_gates
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.model import merged_flags
from tests.unit.support import ROOT

CHECKOUT = Checkout(ROOT)
RECIPES = Recipes([ROOT / "recipes"])
FLAGS = ("tool_call_parser", "reasoning_parser")


def parsers_file(image: str) -> ParsersFile:
    """An image's own file, or that of the image below it, whose engine it has."""
    try:
        return read_parser_gates(CHECKOUT, image).file
    except GateInvalid:
        base = CHECKOUT.spec(image).base
        assert base is not None
        return parsers_file(base)


def used_parsers() -> list[tuple[str, str, dict[str, str]]]:
    found = []
    for name in RECIPES.names():
        recipe = RECIPES.read(name)
        flags = merged_flags(recipe).model_dump(exclude_none=True)
        used = {flag: str(flags[flag]) for flag in FLAGS if flag in flags}
        if used and recipe.image:
            found.append((name, recipe.image, used))
    return found


@pytest.mark.parametrize(("name", "image", "used"), used_parsers())
def test_the_parsers_of_a_recipe_are_judged(name: str, image: str, used: dict[str, str]) -> None:
    file = parsers_file(image)
    is_judged = any(
        all(family.parsers.get(flag) == parser for flag, parser in used.items())  # type: ignore[call-overload]
        for family in file.families.values()
    )
    assert is_judged or set(used.values()) & set(file.not_judged), name


def test_there_are_recipes_that_name_parsers() -> None:
    assert len({image for _, image, _ in used_parsers()}) >= 4
