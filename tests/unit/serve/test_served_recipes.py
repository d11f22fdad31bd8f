from __future__ import annotations

import re
from typing import get_args

import pytest

from pipeline.core.model import Engine
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.model import RecipeCard
from pipeline.serving.serve.log_reader import STAGES
from pipeline.serving.serve.preflight import CARD_NAMES
from tests.unit.support import ROOT

SHIPPED = Recipes([ROOT / "recipes"])


@pytest.mark.parametrize("name", SHIPPED.names())
def test_what_a_shipped_recipe_expects_of_the_log_can_be_looked_for(name: str) -> None:
    expect = SHIPPED.read(name).expect
    assert all(re.compile(line.pattern) for line in (*expect.log, *expect.never))


@pytest.mark.parametrize("name", SHIPPED.names())
def test_the_fallbacks_of_a_shipped_recipe_are_there_and_have_an_end(name: str) -> None:
    seen: list[str] = []
    following: str | None = name
    while following is not None:
        assert following not in seen
        seen.append(following)
        following = SHIPPED.read(following).fallback


def test_every_card_that_a_recipe_may_name_is_known_by_nvidia_smi_s_name() -> None:
    cards = {
        name
        for kind in get_args(RecipeCard.model_fields["card"].annotation)
        for name in get_args(kind)
    }
    assert cards == set(CARD_NAMES)


def test_every_engine_has_stages() -> None:
    assert set(get_args(Engine)) == set(STAGES)
