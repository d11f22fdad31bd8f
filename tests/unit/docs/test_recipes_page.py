"""The page on recipes: its examples are recipes, and its table is that of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.serving.bench.server import GAUGES
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.model import merged_flags
from tests.docs.pages import DOCS, ROOT, Page
from tests.docs.recipe_table import BEGIN, recipe_table, with_recipes

PAGE = Page(DOCS / "recipes.md")
SHORT, OWN, SCRAPE = (block.text for block in PAGE.blocks if block.kind == "yaml")
OURS = ROOT / "recipes"


def test_the_short_example_is_a_part_of_the_recipe_that_it_names() -> None:
    example = yaml.safe_load(SHORT)
    whole = Recipes([OURS]).read(example["name"]).model_dump(mode="json", exclude_none=True)
    assert _missing(example, whole) == []


def test_a_word_that_the_recipe_does_not_have_is_noticed() -> None:
    assert _missing({"a": {"b": 1}}, {"a": {"b": 2}}) == ["a.b"]
    assert _missing({"a": {"b": 1}}, {"a": {}}) == ["a.b"]


def test_the_example_of_an_own_recipe_works_as_the_page_says(tmp_path: Path) -> None:
    name = yaml.safe_load(OWN)["name"]
    (tmp_path / f"{name}.yaml").write_text(OWN, encoding="utf-8")
    flags = merged_flags(Recipes([tmp_path, OURS]).read(name)).given()
    assert flags["gpu_memory_utilization"] == 0.88
    assert flags["max_num_batched_tokens"] == 8192  # as the recipe that it extends has it
    assert "load_format" not in flags


def test_the_scrape_job_asks_the_ports_of_recipes_that_count_their_kv_cache() -> None:
    for target in yaml.safe_load(SCRAPE)["scrape_configs"][0]["static_configs"]:
        recipe = Recipes([OURS]).read(target["labels"]["recipe"])
        assert target["targets"] == [f"127.0.0.1:{recipe.port}"]
        assert recipe.engine == "vllm" or "enable_metrics" in merged_flags(recipe).given()


def test_every_kimi_recipe_for_sglang_counts_its_kv_cache() -> None:
    recipes = [Recipes([OURS]).read(path.stem) for path in OURS.glob("kimi-*.yaml")]
    sglang = [recipe for recipe in recipes if recipe.engine == "sglang"]
    assert len(sglang) >= 4
    assert [r.name for r in sglang if "enable_metrics" not in merged_flags(r).given()] == []


def test_the_page_names_the_metrics_that_a_benchmark_samples() -> None:
    rows = {row.split("|")[1].strip(): row for row in PAGE.text.splitlines() if row[:1] == "|"}
    for engine, prefix in (("vLLM", "vllm:"), ("SGLang", "sglang:")):
        for ours in ("kv_use", "waiting"):
            newest = next(name for name in GAUGES[ours] if name.startswith(prefix))
            assert f"`{newest}`" in rows[engine]
    waiting = next(name for name in GAUGES["waiting"] if name.startswith("llamacpp:"))
    assert f"`{waiting}`" in rows["llama.cpp"]


def test_every_recipe_has_one_row() -> None:
    rows = recipe_table(Recipes([OURS])).splitlines()[2:]
    names = [row.partition("[")[2].partition("]")[0] for row in rows]
    assert names == sorted(path.stem for path in OURS.glob("*.yaml"))
    assert {row.count("|") for row in rows} == {8}


def test_a_page_without_a_place_for_the_table_is_noticed() -> None:
    for page in ("# Recipes\n", f"# Recipes\n{BEGIN}"):
        with pytest.raises(ValueError, match="no place"):
            with_recipes(page)


def _missing(part: object, whole: object, path: str = "") -> list[str]:
    """Where a nested value is not in another one."""
    if not isinstance(part, dict):
        return [] if part == whole else [path]
    others = whole if isinstance(whole, dict) else {}
    return [
        place
        for key, value in part.items()
        for place in _missing(value, others.get(key), f"{path}.{key}" if path else key)
    ]
