"""The recipes that rest on reports: each says whose word every flag is, and none says too much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.flags import Flags, SglangFlags, VllmFlags
from pipeline.serving.recipe.launch import CONTEXT, NodePlace, Overrides, on_node, plan_launch
from pipeline.serving.recipe.model import Recipe, merged_flags
from tests.unit.support import ROOT

FOLDER = ROOT / "recipes"
ALL = [Recipes([FOLDER]).read(name) for name in Recipes([FOLDER]).names()]
REPORTED = [recipe for recipe in ALL if recipe.backing == "reported"]
# the driver tells no size of a GB10, whose memory is the machine's own
MEMORY_GIB = {"rtx-pro-6000": 96, "rtx-5090": 32, "gb10": None}
# as vLLM 0.32.0 and SGLang 0.5.23 write them
LOG_LINES = (
    "Using 'MARLIN' NvFp4 MoE backend out of potential backends: ['FLASHINFER_CUTLASS', 'MARLIN'].",
    "Using 'FLASHINFER_CUTLASS' NvFp4 MoE backend out of potential backends: ['MARLIN'].",
    "Using 'B12X' NvFp4 MoE backend out of potential backends: ['B12X', 'MARLIN'].",
    "Using 'MARLIN' Mxfp4 MoE backend.",
    "Using MarlinNvFp4LinearKernel for NVFP4 GEMM",
    "Using FLASHINFER_MLA_SPARSE_SM120 attention backend out of potential backends: ['A'].",
    "Use flashinfer_mxfp4 as MoE runner backend for DeepseekV4ForCausalLM.",
)

every_recipe = pytest.mark.parametrize("recipe", REPORTED, ids=lambda recipe: recipe.name)


@pytest.mark.parametrize(
    ("family", "cards"),
    [
        ("minimax-m2", {2}),
        ("nemotron-3-super", {1}),
        ("qwen38-27b", {1, 2}),
        ("qwen38-flash-next", {1, 2, 4}),
        ("deepseek-v4-flash", {2, 4, 8}),
        ("deepseek-v41-flash", {4, 8}),
        ("glm-52", {8}),
        ("glm-53-flash", {2, 4, 8}),
        ("gpt-oss-120b", {1}),
    ],
)
def test_a_model_that_people_run_has_recipes_for_their_cards(family: str, cards: set[int]) -> None:
    assert {r.hardware.cards for r in REPORTED if r.name.startswith(family)} == cards


def test_the_5090_has_recipes_of_both_engines() -> None:
    engines = {recipe.engine for recipe in REPORTED if recipe.hardware.card == "rtx-5090"}
    assert engines == {"vllm", "sglang"}


@every_recipe
def test_a_recipe_names_a_report_with_a_link(recipe: Recipe) -> None:
    links = [s.link for s in recipe.sources.values() if s.kind == "report"]
    assert links
    assert all(link and re.match(r"https://[\w.]+/\S+$", link) for link in links)


@every_recipe
def test_every_flag_stands_under_a_report_the_engine_or_a_choice_with_its_reason(
    recipe: Recipe,
) -> None:
    for source in {*recipe.flags, *recipe.environment}:
        kind = recipe.sources[source].kind
        assert kind in ("report", "engine") or (kind == "ours" and recipe.sources[source].why)


@every_recipe
def test_most_flags_are_reported_and_drafts_always_are(recipe: Recipe) -> None:
    kinds = [
        recipe.sources[source].kind for source, group in recipe.flags.items() for _ in group.given()
    ]
    assert kinds.count("report") > len(kinds) / 2
    assert recipe.speculation is None or recipe.sources[recipe.speculation.source].kind == "report"


@every_recipe
def test_the_machine_is_one_we_know_and_all_its_cards_are_used(recipe: Recipe) -> None:
    machine, flags = recipe.hardware, merged_flags(recipe)
    assert machine.card is not None
    assert machine.memory_gib == MEMORY_GIB[machine.card]
    assert machine.cards in (1, 2, 4, 8)
    cards = machine.cards * recipe.nodes
    assert (getattr(flags, "tensor_parallel_size", None) or 1) == cards


@every_recipe
def test_the_image_is_one_of_this_checkout_and_has_the_engine(recipe: Recipe) -> None:
    assert recipe.image is not None
    assert (ROOT / "images" / recipe.image / "image.yaml").is_file()
    assert recipe.image.startswith(recipe.engine)


@every_recipe
def test_a_model_that_calls_tools_or_thinks_has_its_parsers(recipe: Recipe) -> None:
    flags = merged_flags(recipe)
    assert isinstance(flags, VllmFlags | SglangFlags)
    assert bool(flags.tool_call_parser) == recipe.smoke.tools
    # vLLM gives gpt-oss its reasoning parser by itself
    assert bool(flags.reasoning_parser) == (recipe.smoke.reasoning and "gpt-oss" not in recipe.name)
    if isinstance(flags, VllmFlags):
        assert flags.enable_auto_tool_choice is recipe.smoke.tools


@every_recipe
def test_the_walk_of_contexts_ends_below_the_recipes_own(recipe: Recipe) -> None:
    assert recipe.smoke.contexts == sorted(recipe.smoke.contexts)
    longest = context(merged_flags(recipe))
    assert recipe.smoke.contexts
    assert longest is None or recipe.smoke.contexts[-1] < longest


@every_recipe
def test_what_a_change_has_instead_is_on_the_command_line(recipe: Recipe) -> None:
    launch = plan_launch(recipe, Overrides(), weights="/weights")
    if recipe.nodes > 1:
        launch = on_node(launch, NodePlace(0, "A", "A"))
    words = launch.arguments
    for change in recipe.changes:
        here = [word for word in change.here.split() if word not in ("nothing", "and")]
        assert [word for word in here if word not in words] == []


@every_recipe
def test_a_pattern_of_the_log_fits_a_line_that_the_engine_writes(recipe: Recipe) -> None:
    for line in (*recipe.expect.log, *recipe.expect.never):
        assert any(re.search(line.pattern, known) for known in LOG_LINES), line.pattern


@every_recipe
def test_no_line_is_both_wanted_and_forbidden(recipe: Recipe) -> None:
    for known in LOG_LINES:
        wanted = [x.pattern for x in recipe.expect.log if re.search(x.pattern, known)]
        forbidden = [x.pattern for x in recipe.expect.never if re.search(x.pattern, known)]
        assert not (wanted and forbidden)


@every_recipe
def test_drafts_are_off_unless_the_name_says_so(recipe: Recipe) -> None:
    enabled = recipe.speculation is not None and recipe.speculation.enabled
    assert enabled == recipe.name.endswith("-mtp")


def test_no_two_recipes_are_the_same() -> None:
    contents = [r.model_dump_json(exclude={"name", "summary"}) for r in ALL]
    assert len({recipe.name for recipe in ALL}) == len(ALL)
    assert len(set(contents)) == len(ALL)
    assert len({recipe.summary for recipe in ALL}) == len(ALL)


def test_the_name_of_a_recipe_tells_its_cards() -> None:
    for recipe in REPORTED:
        tail = "-5090" if recipe.hardware.card == "rtx-5090" else ""
        cards = recipe.hardware.cards * recipe.nodes
        assert f"-{recipe.engine}-{cards}x{tail}" in recipe.name


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sources": {"seen": {"kind": "report", "title": "a forum"}}}, "needs its `link`"),
        ({"sources": {"seen": {"kind": "ours", "title": "a guess"}}}, "needs its `why`"),
        ({"flags": {"nobody": {"max_num_seqs": 8}}}, "not among its `sources`"),
        ({"environment": {"nobody": {"A": "1"}}}, "not among its `sources`"),
        ({"sources": {"seen": {"kind": "engine", "title": "its parser"}}}, "is a report"),
        ({"speculation": {"method": "mtp", "tokens": 3, "source": "nobody"}}, "not among"),
        ({"flags": {"seen": {"max_num_sequences": 8}}}, "Extra inputs"),
    ],
)
def test_a_recipe_that_does_not_say_who_says_so_is_refused(
    tmp_path: Path, wrong: dict[str, Any], says: str
) -> None:
    write(tmp_path, {**SMALL, **wrong})
    with pytest.raises(RecipeInvalid, match=says):
        Recipes([tmp_path]).read("small")


def test_a_small_recipe_with_a_report_is_read(tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    assert Recipes([tmp_path]).read("small").sources["seen"].kind == "report"


SMALL: dict[str, Any] = {
    "name": "small",
    "summary": "a small recipe for tests",
    "backing": "reported",
    "sources": {"seen": {"kind": "report", "title": "a run", "link": "https://example.org/run"}},
    "engine": "vllm",
    "image": "vllm",
    "model": {"repository": "org/model", "name": "model"},
    "hardware": {"cards": 1, "card": "rtx-5090", "memory_gib": 32},
    "port": 8000,
}


def write(folder: Path, body: dict[str, Any]) -> None:
    (folder / "small.yaml").write_text(yaml.safe_dump(body), encoding="utf-8")


def context(flags: Flags) -> int | None:
    value: int | None = getattr(flags, CONTEXT[type(flags)])
    return value
