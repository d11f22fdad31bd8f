"""The podman command of "Running Kimi-K2.6 Locally", flag for flag; and every recipe rendered."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pipeline.images.engine.parser_flags import find_parser_flags, flags_folder
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.container import LaunchTarget
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import Overrides, plan_launch, with_whole_repositories
from pipeline.serving.recipe.parser import check_flags
from pipeline.serving.recipe.render.formats import CONTAINED, render_launch
from tests.unit.recipe.render.launches import DIGEST, TARGET
from tests.unit.recipe.test_seed_commands import ARTICLE
from tests.unit.support import ROOT

RECIPES = Recipes([ROOT / "recipes"])
# ${REF} is a commit in the Hub's cache
WEIGHTS = "/mnt/data/models/models--ubergarm--Kimi-K2.6-GGUF/snapshots/${REF}"


def document_words(text: str) -> list[str]:
    # shlex knows no continued lines
    return shlex.split(text.replace("\\\n", " "))


def by_flag(words: list[str]) -> list[list[str]]:
    """Flags with their values, in any order but with patterns in theirs: the first one counts."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    return sorted(groups, key=lambda group: group[0])


def test_podman_is_told_what_the_document_tells_it_but_for_the_images_digest() -> None:
    recipe = RECIPES.read("kimi-k26-ik-llama-2x")
    launch = with_whole_repositories(plan_launch(recipe, Overrides(), weights=WEIGHTS))
    image = f"registry.home.arpa/ik_llama.cpp@{DIGEST}"
    got = document_words(render_launch(launch, LaunchTarget(image=image), "podman"))
    want = document_words(ARTICLE)
    at = want.index("registry.home.arpa/ik_llama.cpp:latest")
    # all before the image, in the document's order
    assert got[:at] == want[:at]
    assert got[at] == image
    assert by_flag(got[at + 1 :]) == by_flag(want[at + 1 :])


@pytest.mark.parametrize(
    ("word", "other", "problem"),
    [
        ("-ger", "-ger", ""),
        ("-ger", "--grouped-experts", "--grouped-experts"),
        ("-mla", "--mla", "--mla"),
        ("512", "half", "half"),
    ],
)
def test_the_ik_llama_that_is_compiled_here_takes_the_document_s_words_as_they_are(
    word: str, other: str, problem: str
) -> None:
    words = document_words(ARTICLE)
    given = words[words.index("registry.home.arpa/ik_llama.cpp:latest") + 1 :]
    given[given.index(word)] = other
    launch = plan_launch(RECIPES.read("kimi-k26-ik-llama-2x"), Overrides(), weights=WEIGHTS)
    flags = find_parser_flags(flags_folder(Checkout(ROOT)), launch.engine, launch.image)
    found = check_flags(launch.model_copy(update={"arguments": given}), flags)
    assert len(found) == bool(problem)
    assert all(problem in str(each) for each in found)


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_shipped_recipe_can_be_rendered(name: str, tmp_path: Path) -> None:
    recipe = RECIPES.read(name)
    if recipe.model.folder:
        (tmp_path / recipe.model.folder).mkdir(parents=True)
        (tmp_path / recipe.model.folder / "x-00001-of-00002.gguf").touch()
    launch = plan_launch(recipe, Overrides(), weights=str(tmp_path), digest=DIGEST)
    for format_name in [*(CONTAINED if recipe.image else []), "shell"]:
        if recipe.nodes > 1 and format_name == "kubernetes":
            continue  # is refused
        text = render_launch(launch, TARGET, format_name)
        assert all(word in text for word in (launch.arguments[0], str(launch.port)))
