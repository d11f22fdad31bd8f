"""Recipes by name, and what they extend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import RecipeInvalid, UnknownRecipe
from pipeline.serving.recipe.find import Recipes, merge
from tests.unit.recipe.bodies import DRAFTS, body, write


def child(**changes: Any) -> dict[str, Any]:
    return {"name": "two", "extends": "one", **changes}


def test_a_recipe_is_found_by_its_name(tmp_path: Path) -> None:
    recipes = write(tmp_path, body(), body(name="another"))
    assert recipes.names() == ["another", "one"]
    assert recipes.read("one").name == "one"


def test_an_earlier_folder_hides_a_later_one(tmp_path: Path) -> None:
    write(tmp_path / "mine", body(port=1))
    write(tmp_path / "theirs", body(port=2), body(name="only-theirs"))
    recipes = Recipes([tmp_path / "mine", tmp_path / "theirs"])
    assert recipes.names() == ["one", "only-theirs"]
    assert recipes.read("one").port == 1


def test_a_recipe_of_one_s_own_extends_a_shipped_one(tmp_path: Path) -> None:
    write(tmp_path / "mine", child(port=9))
    write(tmp_path / "theirs", body())
    two = Recipes([tmp_path / "mine", tmp_path / "theirs"]).read("two")
    assert (two.name, two.port, two.model.name) == ("two", 9, "m")


@pytest.mark.parametrize("name", ["missing", "", "../one", "one.yaml"])
def test_an_unknown_name_is_told_with_those_that_there_are(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "recipes"
    write(tmp_path, body())  # beside the folder, never reached
    recipes = write(folder, body(name="known"))
    with pytest.raises(UnknownRecipe, match="there are: known"):
        recipes.read(name)


def test_an_empty_folder_has_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(UnknownRecipe, match="there are: none"):
        Recipes([tmp_path]).read("one")


@pytest.mark.parametrize("name", ["My recipe", "UPPER", "ünïcode"])
def test_a_file_whose_name_is_none_of_a_recipe_is_told_as_that(tmp_path: Path, name: str) -> None:
    recipes = write(tmp_path, body())
    (tmp_path / f"{name}.yaml").write_text("{}")
    assert recipes.names() == sorted(["one", name])
    with pytest.raises(RecipeInvalid, match=rf"{name}\.yaml: this is no name of a recipe"):
        recipes.read(name)


def test_what_editors_leave_beside_recipes_is_none(tmp_path: Path) -> None:
    recipes = write(tmp_path, body())
    (tmp_path / ".hidden.yaml").write_text("{}")
    (tmp_path / ".#one.yaml").symlink_to("somebody@machine.1234")
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    (tmp_path / "folder.yaml").mkdir()
    assert recipes.names() == ["one"]
    with pytest.raises(UnknownRecipe, match="there are: one"):
        recipes.read("folder")


def test_tables_are_joined_and_lists_replaced(tmp_path: Path) -> None:
    one = body(smoke={"streams": [1, 2], "vision": True}, bench=["a", "b"])
    two = child(smoke={"streams": [4]}, bench=["c"], hardware={"host_memory_gib": 100})
    found = write(tmp_path, one, two).read("two")
    assert (found.smoke.streams, found.smoke.vision, found.bench) == ([4], True, ["c"])
    assert (found.hardware.cards, found.hardware.host_memory_gib) == (2, 100)


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({"speculation": None}, "speculation"),
        ({"image": None}, "image"),
        ({"fallback": None}, "fallback"),
    ],
)
def test_null_removes_what_the_parent_says(
    tmp_path: Path, changes: dict[str, None], gone: str
) -> None:
    recipes = write(tmp_path, body(speculation=DRAFTS, fallback="other"), child(**changes))
    assert getattr(recipes.read("one"), gone) is not None
    assert getattr(recipes.read("two"), gone) is None


@pytest.mark.parametrize("source", ["paper", "us"])
def test_a_child_s_flag_takes_the_parent_s_place_whoever_named_it(
    tmp_path: Path, source: str
) -> None:
    two = child(flags={source: {"max_model_len": 8192}})
    found = write(tmp_path, body(), two).read("two")
    given = {name: group.given() for name, group in found.flags.items()}
    assert given.pop(source)["max_model_len"] == 8192
    assert "max_model_len" not in str(given)


def test_a_child_takes_a_flag_away_and_its_group_when_it_was_the_last(tmp_path: Path) -> None:
    two = child(flags={"paper": {"max_model_len": None}})
    found = write(tmp_path, body(), two).read("two")
    assert list(found.flags) == ["paper"]
    assert found.flags["paper"].given() == {"tensor_parallel_size": 2}


def test_a_child_s_extra_words_take_the_place_of_all_the_parent_s(tmp_path: Path) -> None:
    one = body(flags={"paper": {"block_size": 64, "extra": ["--seed", "7"]}})
    found = write(tmp_path, one, child(flags={"us": {"extra": ["--a"]}})).read("two")
    assert {name: group.extra for name, group in found.flags.items()} == {
        "paper": [],
        "us": ["--a"],
    }


@pytest.mark.parametrize("table", ["flags", "environment"])
def test_null_takes_all_that_one_source_says_away(tmp_path: Path, table: str) -> None:
    one = body(environment={"paper": {"A": "1"}, "us": {"B": "1"}})
    found = write(tmp_path, one, child(**{table: {"us": None}})).read("two")
    assert list(getattr(found, table)) == ["paper"]


def test_a_child_s_variable_takes_the_parent_s_place(tmp_path: Path) -> None:
    one = body(environment={"paper": {"A": "1", "B": "1"}})
    found = write(tmp_path, one, child(environment={"us": {"A": "2"}})).read("two")
    assert found.environment == {"paper": {"B": "1"}, "us": {"A": "2"}}


def test_a_grandchild_has_what_both_say(tmp_path: Path) -> None:
    three = {"name": "three", "extends": "two", "flags": {"us": {"block_size": 64}}}
    found = write(tmp_path, body(), child(port=2), three).read("three")
    assert (found.port, found.flags["us"].given()) == (
        2,
        {"max_model_len": 4096, "block_size": 64},
    )


def test_a_child_with_another_engine_is_judged_as_that_engine(tmp_path: Path) -> None:
    recipes = write(tmp_path, body(), child(engine="sglang"))
    with pytest.raises(RecipeInvalid, match=r"two\.yaml: sglang\.flags\.us\.max_model_len"):
        recipes.read("two")


def test_the_files_of_a_recipe_are_its_own_and_those_that_it_extends(tmp_path: Path) -> None:
    child, grandchild = {"name": "b", "extends": "a"}, {"name": "c", "extends": "b"}
    recipes = write(tmp_path, body(name="a"), child, grandchild)
    assert [path.name for path in recipes.files("c")] == ["c.yaml", "b.yaml", "a.yaml"]
    assert [path.name for path in recipes.files("a")] == ["a.yaml"]


@pytest.mark.parametrize(
    ("recipes", "asked", "message"),
    [
        ([body(name="a", extends="a")], "a", "a → a has no end"),
        ([body(name="a", extends="b"), body(name="b", extends="a")], "a", "a → b → a has no end"),
        ([body(name="a", extends=["b"])], "a", "extends: names one recipe"),
        ([body(name="a", extends={"b": 1})], "a", "extends: names one recipe"),
    ],
)
def test_what_extends_itself_or_no_name_is_refused(
    tmp_path: Path, recipes: list[dict[str, Any]], asked: str, message: str
) -> None:
    with pytest.raises(RecipeInvalid, match=message):
        write(tmp_path, *recipes).read(asked)


def test_a_long_chain_is_refused_and_a_shorter_one_is_not(tmp_path: Path) -> None:
    links = [{"name": f"n{n}", "extends": f"n{n - 1}"} for n in range(1, 12)]
    recipes = write(tmp_path, body(name="n0"), *links)
    assert recipes.read("n8").name == "n8"
    with pytest.raises(RecipeInvalid, match="has no end"):
        recipes.read("n11")


@pytest.mark.parametrize("parent", ["missing", "../one"])
def test_an_unknown_parent_is_told_with_the_file_that_names_it(tmp_path: Path, parent: str) -> None:
    with pytest.raises(UnknownRecipe, match=r"two\.yaml: extends: there is no recipe"):
        write(tmp_path, child(extends=parent)).read("two")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "other"}, "one.yaml: name: is 'other', the file is one.yaml"),
        ({"flavour": 1}, "one.yaml: vllm.flavour: Extra inputs"),
        ({"port": "many"}, "one.yaml: vllm.port: Input should be a valid integer"),
        ({"flags": {"paper": {"max_model_len": "x"}}}, "flags.paper.max_model_len"),
        ({"engine": "tgi"}, "one.yaml: the file: "),
    ],
)
def test_a_wrong_field_is_told_with_its_file(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    recipes = write(tmp_path, json.dumps(body() | changes))  # which is YAML too
    with pytest.raises(RecipeInvalid) as refused:
        recipes.read("one")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "just words",
        "name: one\nname: one\n",
        "a: &x [1]\nb: *x\n",
        "? [1, 2]\n: 3\n",
        "name: [unclosed",
        "name: !!python/object/apply:os.system ['true']",
        "extends: one\n" + "x: " + "[" * 40 + "]" * 40,
        "1: 2",
        "name: one\nport: 0x",
        "\x00",
    ],
)
def test_hostile_yaml_is_an_error_of_the_recipe(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeInvalid, match=r"one\.yaml"):
        write(tmp_path, text).read("one")


def test_a_file_that_is_no_text_and_one_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long.yaml").write_bytes(b"# " + b"x" * (9 << 20))
    for name, why in {"bytes": "not valid YAML", "long": "larger than"}.items():
        with pytest.raises(RecipeInvalid, match=f"{name}.yaml: {why}"):
            Recipes([tmp_path]).read(name)


@pytest.mark.parametrize("table", ["flags", "environment"])
@pytest.mark.parametrize("group", [1, "x", [1]])
def test_a_group_of_a_child_that_is_no_table_is_refused(
    tmp_path: Path, table: str, group: Any
) -> None:
    one = body(environment={"paper": {"A": "1"}})
    with pytest.raises(RecipeInvalid, match=r"two\.yaml: .*tables by source"):
        write(tmp_path, one, child(**{table: {"paper": group}})).read("two")


@pytest.mark.parametrize("own", [[1], "x", 3])
def test_flags_of_a_child_that_are_no_table_are_refused(tmp_path: Path, own: Any) -> None:
    with pytest.raises(RecipeInvalid, match=r"two\.yaml: vllm\.flags"):
        write(tmp_path, body(), child(flags=own)).read("two")


def test_a_table_takes_the_place_of_what_is_none(tmp_path: Path) -> None:
    recipes = write(tmp_path, body(flags=[1]), child(flags={"us": {"block_size": 16}}))
    assert recipes.read("two").flags["us"].given() == {"block_size": 16}
    with pytest.raises(RecipeInvalid, match=r"one\.yaml: vllm\.flags"):
        recipes.read("one")


def test_merging_leaves_the_parent_as_it_was() -> None:
    parent = {"a": {"b": 1, "c": 2}, "flags": {"x": {"f": 1}}}
    merged = merge(parent, {"a": {"b": None, "d": 3}, "flags": {"y": {"f": 2}}})
    assert merged == {"a": {"c": 2, "d": 3}, "flags": {"y": {"f": 2}}}
    assert parent == {"a": {"b": 1, "c": 2}, "flags": {"x": {"f": 1}}}
