"""The shipped recipes can be read, and what they name is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from pipeline.core.yaml_file import schema
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import Overrides, plan_launch
from pipeline.serving.recipe.model import LlamaRecipe, Recipe, RecipeFile, merged_flags
from pipeline.weights.model import WeightsSpec, read_spec, spec_names
from tests.unit.recipe.bodies import body
from tests.unit.recipe.commands import launch_parts, parts
from tests.unit.spec.json_schema import problems
from tests.unit.support import AMD64, ARM64, ROOT

CHECKOUT = Checkout(ROOT)
FOLDER = ROOT / "recipes"
RECIPES = Recipes([FOLDER])
NAMES = RECIPES.names()
# The first words of an image's entrypoint, by the engine that a recipe gives its flags to.
STARTS = {
    "vllm": ["/opt/venv/bin/vllm", "serve"],
    "sglang": ["/opt/venv/bin/python", "-m", "sglang.launch_server"],
}


def images_of(recipe: Recipe) -> list[str]:
    return [recipe.image] if recipe.image else []


def weights_of(recipe: Recipe) -> list[tuple[str, str | None]]:
    named = [(recipe.model.weights, recipe.model.repository)]
    if recipe.speculation:
        named.append((recipe.speculation.weights, recipe.speculation.repository))
    return [(name, repository) for name, repository in named if name is not None]


def is_wanted(spec: WeightsSpec, recipe: LlamaRecipe) -> bool:
    return spec.wants(recipe.model.file or f"{recipe.model.folder}/x-00001-of-00002.gguf")


def test_the_documents_recipes_are_all_there() -> None:
    assert set(NAMES) >= {
        "kimi-k26-vllm-8x",
        "kimi-k26-vllm-local",
        "kimi-k26-sglang-8x",
        "kimi-k2-thinking-nvfp4-sglang-8x",
        "kimi-k2-instruct-sglang-8x",
        "kimi-k25-int4-sglang-8x",
        "kimi-k26-vllm-b200",
        "kimi-k26-ik-llama-2x",
        "kimi-k26-ik-llama-2x-q4-x",
        "kimi-k26-ik-llama-2x-6-layers",
        "kimi-k26-ik-llama-2x-10-layers",
        "kimi-k26-ik-llama-2x-cpu-moe",
        "kimi-k26-llama-cpp-2x",
        "tiny-cpu",
        "tiny-ik-cpu",
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_is_a_command(name: str, tmp_path: Path) -> None:
    recipe = RECIPES.read(name)
    if recipe.model.folder:
        (tmp_path / recipe.model.folder).mkdir(parents=True)
        (tmp_path / recipe.model.folder / "x-00001-of-00002.gguf").touch()
    launch = plan_launch(recipe, Overrides(), weights=str(tmp_path), draft="/draft-weights")
    assert launch.recipe == name
    assert str(launch.port) in launch.arguments


@pytest.mark.parametrize("name", NAMES)
def test_the_image_of_a_recipe_is_one_of_its_engine(name: str) -> None:
    recipe = RECIPES.read(name)
    for image in images_of(recipe):
        spec = CHECKOUT.spec(image)
        if recipe.engine in STARTS:
            words = STARTS[recipe.engine]
            assert spec.entrypoint[: len(words)] == words
        else:
            assert image.startswith(recipe.engine)


@pytest.mark.parametrize("name", NAMES)
def test_the_image_of_a_recipe_is_made_for_the_machine(name: str) -> None:
    recipe = RECIPES.read(name)
    # GB10 sits beside an Arm CPU; a recipe without a card is for any machine
    card = recipe.hardware.card
    needed = {ARM64} if card == "gb10" else {AMD64} if card else {AMD64, ARM64}
    for image in images_of(recipe):
        assert needed <= set(CHECKOUT.spec(image).platforms)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_of_a_recipe_are_asked_for(name: str) -> None:
    recipe = RECIPES.read(name)
    for weights, repository in weights_of(recipe):
        assert weights in spec_names(CHECKOUT)
        assert read_spec(CHECKOUT, weights).repository == repository


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_of_a_recipe_are_of_the_format_that_its_engine_reads(name: str) -> None:
    recipe = RECIPES.read(name)
    if recipe.model.weights is None:
        return
    spec = read_spec(CHECKOUT, recipe.model.weights)
    assert spec.format == ("gguf" if isinstance(recipe, LlamaRecipe) else "safetensors")
    assert not isinstance(recipe, LlamaRecipe) or is_wanted(spec, recipe)


@pytest.mark.parametrize("name", NAMES)
def test_falling_back_ends_at_a_recipe_for_the_same_cards(name: str) -> None:
    recipe, seen = RECIPES.read(name), {name}
    while recipe.fallback is not None:
        following = RECIPES.read(recipe.fallback)
        assert following.name not in seen
        assert following.hardware.card == recipe.hardware.card
        assert following.hardware.cards == recipe.hardware.cards
        recipe, seen = following, {*seen, following.name}


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_behind_a_recipe_is_what_its_flags_come_from(name: str) -> None:
    recipe = RECIPES.read(name)
    named = {*recipe.flags, *recipe.environment}
    kinds = {recipe.sources[source].kind for source in named}
    kind = {"stated": "document", "reported": "report"}.get(recipe.backing, "ours")
    assert kind in kinds


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("tiny")])
def test_only_what_was_run_here_is_proved(name: str) -> None:
    assert RECIPES.read(name).backing != "proved"


@pytest.mark.parametrize("name", NAMES)
def test_the_patterns_of_a_log_are_ones(name: str) -> None:
    expect = RECIPES.read(name).expect
    for line in (*expect.log, *expect.never):
        assert re.compile(line.pattern).search("") is None


# As the launcher of llama-cpp-cpu and ik_llama.cpp spell them in full.
LONG = {"-t": "--threads", "-np": "--parallel", "-c": "--ctx-size"}


@pytest.mark.parametrize(
    ("name", "file"),
    [("tiny-cpu", "test_llama_image.py"), ("tiny-ik-cpu", "test_ik_llama_image.py")],
)
def test_a_tiny_recipe_has_the_flags_that_its_image_was_tried_with(name: str, file: str) -> None:
    text = (ROOT / "tests" / "integration" / file).read_text(encoding="utf-8")
    [tried] = [line for line in text.splitlines() if line.startswith("SERVE = ")]
    words = [LONG.get(word, word) for word in json.loads(tried.removeprefix("SERVE = "))]
    launch = plan_launch(RECIPES.read(name), Overrides(), weights="/w")
    ours = launch_parts(launch, program=False)
    assert set(parts(" ".join(words))) == set(ours) - {"--alias tiny", "--port 8080.0"}


def test_the_schema_for_editors_is_that_of_the_code() -> None:
    text = (FOLDER / "recipe.schema.json").read_text(encoding="utf-8")
    assert text == schema(RecipeFile)


SCHEMA = json.loads(schema(RecipeFile))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_its_schema_and_fits_it(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert problems(yaml.safe_load(text), SCHEMA, SCHEMA) == []


@pytest.mark.parametrize(
    "wrong",
    [
        body() | {"flavour": 1},
        body() | {"engine": "tgi"},
        body() | {"flags": {"paper": {"tensor_parallel_sice": 2}}},
        {"name": "two", "extends": ["one"]},
        {"name": "two", "extends": "one", "flavour": 1},
        {"extends": "one"},
        {"name": "two"},
    ],
)
def test_the_schema_refuses_what_a_recipe_may_not_say(wrong: object) -> None:
    assert problems(wrong, SCHEMA, SCHEMA)


@pytest.mark.parametrize(
    "right", [body(), body("sglang"), body("ik-llama"), {"name": "two", "extends": "one"}]
)
def test_the_schema_accepts_whole_recipes_and_children(right: object) -> None:
    assert problems(right, SCHEMA, SCHEMA) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_patches_that_a_recipe_needs_are_in_its_image(name: str) -> None:
    recipe, checkout = RECIPES.read(name), Checkout(ROOT)
    image = recipe.image if recipe.needs_patches else None
    chain = checkout.chain(image, "linux/amd64") if image else []
    found = {patch.file for spec in chain for patch in checkout.series(spec).patches}
    assert set(recipe.needs_patches) <= found


def test_an_fp8_cache_for_dense_mla_on_sm120_needs_the_patch() -> None:
    """102,400 bytes of 101,376: vllm-project/vllm#46721."""
    needing = [
        recipe.name
        for recipe in map(RECIPES.read, NAMES)
        if (flags := merged_flags(recipe).given()).get("attention_backend") == "TRITON_MLA"
        and flags.get("kv_cache_dtype") == "fp8"
    ]
    assert needing == ["kimi-k26-vllm-8x", "kimi-k26-vllm-8x-zen5"]
    assert all(RECIPES.read(name).needs_patches for name in needing)
