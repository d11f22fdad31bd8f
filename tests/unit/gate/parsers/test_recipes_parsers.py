"""Every parser that a recipe names is judged by cases of its image."""

from __future__ import annotations

from functools import cache

import pytest

from pipeline.core.verdict import GateVerdict
from pipeline.images.gate.evidence import Evidence, EvidenceRow
from pipeline.images.gate.parsers.cases import ParserGates, read_parser_gates
from pipeline.images.gate.parsers.judge import parser_doubts
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.model import merged_flags
from tests.unit.support import ROOT

CHECKOUT = Checkout(ROOT)
RECIPES = Recipes([ROOT / "recipes"])
FLAGS = ("tool_call_parser", "reasoning_parser")


def used_parsers() -> list[tuple[str, str, dict[str, str]]]:
    found = []
    for name in RECIPES.names():
        recipe = RECIPES.read(name)
        flags = merged_flags(recipe).model_dump(exclude_none=True)
        used = {flag: str(flags[flag]) for flag in FLAGS if flag in flags}
        if used and recipe.image:
            found.append((name, recipe.image, used))
    return found


USED = used_parsers()


@cache
def gates(image: str) -> ParserGates:
    return read_parser_gates(CHECKOUT, image)


def evidence(image: str, verdict: GateVerdict, without: str = "") -> Evidence:
    """What the gate keeps of an image whose cases all end so."""
    rows = [
        EvidenceRow(
            name=case.name,
            verdict=verdict,
            message="names: token by token",
            facts={"parsers": case.parsers, "severity": "token by token"},
        )
        for case in gates(image).cases
        if without not in case.parsers.values()
    ]
    return Evidence(
        gate="parsers", arch="sm_120", verdict=verdict, inputs={}, made_by={}, rows=rows
    )


@pytest.mark.parametrize(("name", "image", "used"), USED)
def test_serving_a_recipe_warns_of_no_parser_once_its_image_has_passed(
    name: str, image: str, used: dict[str, str]
) -> None:
    assert parser_doubts(used, evidence(image, "passed"), {}) == "", name


@pytest.mark.parametrize(("name", "image", "used"), USED)
def test_a_recipe_whose_parsers_have_no_case_is_named(
    name: str, image: str, used: dict[str, str]
) -> None:
    for parser in used.values():
        doubts = parser_doubts(used, evidence(image, "passed", without=parser), {})
        assert "were not judged on this image" in doubts, name


@pytest.mark.parametrize(("name", "image", "used"), USED)
def test_a_recipe_whose_parsers_fail_is_named(name: str, image: str, used: dict[str, str]) -> None:
    for verdict in ("failed", "unknown"):
        doubts = parser_doubts(used, evidence(image, verdict), {})
        assert "known answers: " in doubts, name
        assert "names: token by token" in doubts


@pytest.mark.parametrize("image", sorted({image for _, image, _ in USED}))
def test_no_image_leaves_a_parser_of_a_recipe_out(image: str) -> None:
    named = {parser for _, its, used in USED if its == image for parser in used.values()}
    assert not named & set(gates(image).file.not_judged)


def test_there_are_recipes_that_name_parsers() -> None:
    assert {image for _, image, _ in USED} == {"sglang", "vllm", "vllm-b12x", "vllm-nccl"}
    assert ("gpt-oss-120b-vllm-1x", "vllm", {"tool_call_parser": "openai"}) in USED
