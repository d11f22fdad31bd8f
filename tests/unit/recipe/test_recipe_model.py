"""What a recipe may say, and what it may not."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from pipeline.serving.recipe.flags import LlamaFlags, SglangFlags, VllmFlags
from pipeline.serving.recipe.launch import Overrides
from pipeline.serving.recipe.model import Override, RecipeFile, RecipeSource, merged_flags
from tests.unit.recipe.bodies import DRAFTS, body, recipe, without


@pytest.mark.parametrize("engine", ["vllm", "sglang", "ik-llama"])
def test_a_small_recipe_of_each_engine_is_one(engine: str) -> None:
    assert recipe(engine).engine == engine


@pytest.mark.parametrize(
    ("engine", "changes", "message"),
    [
        ("vllm", {"engine": "tgi"}, "does not match any of the expected tags"),
        ("vllm", {"engine": None}, "Unable to extract tag"),
        ("vllm", {"flavour": "new"}, "Extra inputs are not permitted"),
        ("vllm", {"name": "../one"}, "should match pattern"),
        ("vllm", {"port": 70000}, "less than or equal to 65535"),
        ("vllm", {"port": "many"}, "valid integer"),
        ("vllm", {"host": "example.invalid"}, "should match pattern"),
        ("vllm", {"backing": "sure"}, "'stated', 'reported' or 'proved'"),
        ("vllm", {"sources": {}}, "at least 1 item"),
        ("vllm", {"summary": "two\nlines"}, "should match pattern"),
        ("vllm", {"overrides": ["MODEL"]}, "MODEL_PATH"),
        ("vllm", {"flags": {"paper": {"tensor_parallel_sice": 2}}}, "Extra inputs"),
        ("vllm", {"flags": {"paper": {"max_model_len": 0}}}, "greater than or equal to 1"),
        ("vllm", {"flags": {"paper": {"gpu_memory_utilization": 1.5}}}, "less than or equal"),
        ("vllm", {"flags": {"paper": {"mla": 3}}}, "Extra inputs"),
        ("sglang", {"flags": {"paper": {"max_model_len": 4096}}}, "Extra inputs"),
        ("ik-llama", {"flags": {"paper": {"mla": 4}}}, "0, 1, 2 or 3"),
        ("ik-llama", {"flags": {"paper": {"override_tensor": "exps=CPU"}}}, "valid list"),
        ("vllm", {"flags": {"nobody": {"max_model_len": 1}}}, "'nobody' is not among its"),
        ("vllm", {"environment": {"nobody": {"A": "1"}}}, "'nobody' is not among its"),
        ("vllm", {"speculation": DRAFTS | {"source": "nobody"}}, "'nobody' is not among its"),
        ("vllm", {"speculation": DRAFTS | {"tokens": 0}}, "greater than or equal to 1"),
        ("vllm", {"environment": {"paper": {"lower": "1"}}}, "should match pattern"),
        ("vllm", {"environment": {"paper": {"A": "1\n2"}}}, "should match pattern"),
        ("vllm", {"environment": {"paper": {"A": 1}}}, "valid string"),
        ("vllm", {"model": {"name": "m"}}, "needs a `repository`, or `tiny: true`"),
        ("vllm", {"model": {"repository": "a/b", "tiny": True, "name": "m"}}, "or `tiny: true`"),
        ("vllm", {"model": {"repository": "a/b/c", "name": "m"}}, "should match pattern"),
        ("vllm", {"model": {"repository": "a/b", "name": "two words"}}, "should match pattern"),
        ("ik-llama", {"model": {"repository": "a/b", "name": "m"}}, "needs its `file`"),
        (
            "ik-llama",
            {"model": {"repository": "a/b", "name": "m", "file": "../x.gguf"}},
            "plain relative path",
        ),
        (
            "ik-llama",
            {"model": {"repository": "a/b", "name": "m", "file": "x.gguf", "folder": "y"}},
            "`folder` says nothing more",
        ),
        ("vllm", {"hardware": {"cards": 2}}, "`card` names the cards"),
        ("vllm", {"hardware": {"cards": 0, "card": "gb10"}}, "`card` names the cards"),
        ("vllm", {"hardware": {"cards": 1, "card": "rtx-9000"}}, "'rtx-pro-6000'"),
        ("vllm", {"smoke": {"streams": [0]}}, "greater than or equal to 1"),
        ("vllm", {"container": {"ipc": "none"}}, "'host' or 'private'"),
        ("vllm", {"changes": [{"document": "-a", "here": "-b"}]}, "Field required"),
        ("vllm", {"reviewed": "yesterday"}, "should match pattern"),
        ("vllm", {"expect": {"log": [{"pattern": "(", "why": "w"}]}}, "no regular expression"),
        ("vllm", {"expect": {"never": [{"pattern": "(", "why": "w"}]}}, "no regular expression"),
    ],
)
def test_what_a_recipe_may_not_say_is_named(
    engine: str, changes: dict[str, Any], message: str
) -> None:
    given = {k: v for k, v in (body(engine) | changes).items() if v is not None}
    with pytest.raises(ValidationError) as refused:
        RecipeFile.model_validate(given)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "path", ["name", "summary", "backing", "sources", "model", "model.name", "hardware", "port"]
)
def test_what_every_recipe_needs_is_asked_for(path: str) -> None:
    given = body()
    without(path)(given)
    with pytest.raises(ValidationError, match="Field required"):
        RecipeFile.model_validate(given)


@pytest.mark.parametrize("table", ["flags", "environment"])
def test_a_field_is_set_by_one_source(table: str) -> None:
    group: dict[str, Any] = {"max_model_len": 1} if table == "flags" else {"A": "1"}
    given = body() | {table: {"paper": group, "us": group}}
    with pytest.raises(ValidationError, match=f"{next(iter(group))} is set by two sources"):
        RecipeFile.model_validate(given)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "report", "title": "x"}, "a report needs its `link`"),
        ({"kind": "ours", "title": "x"}, "a choice of ours needs its `why`"),
        ({"kind": "rumour", "title": "x"}, "'document', 'report', 'engine' or 'ours'"),
        ({"kind": "document"}, "Field required"),
    ],
)
def test_a_source_says_what_its_kind_needs(source: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RecipeSource.model_validate(source)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("backing", "kinds", "message"),
    [
        ("stated", ["report", "ours", "engine"], "needs a source that is a document"),
        ("reported", ["document", "ours", "engine"], "needs a source that is a report"),
    ],
)
def test_a_backing_needs_a_source_of_its_kind(backing: str, kinds: list[str], message: str) -> None:
    sources = {k: {"kind": k, "title": "x", "link": "y#1", "why": "z"} for k in kinds}
    with pytest.raises(ValidationError, match=message):
        recipe(backing=backing, sources=sources, flags={})
    right = message.rpartition(" ")[2]
    sources[right] = {"kind": right, "title": "x", "link": "y#1"}
    assert recipe(backing=backing, sources=sources, flags={}).backing == backing


def test_the_flags_of_all_sources_become_one_value() -> None:
    flags = {
        "paper": {"tensor_parallel_size": 2, "extra": ["--a"]},
        "us": {"max_model_len": 4096, "extra": ["--b", "1"]},
    }
    merged = merged_flags(recipe(flags=flags))
    assert merged.arguments() == [
        *("--tensor-parallel-size", "2", "--max-model-len", "4096"),
        *("--a", "--b", "1"),
    ]


@pytest.mark.parametrize(
    ("engine", "kind"), [("vllm", VllmFlags), ("sglang", SglangFlags), ("ik-llama", LlamaFlags)]
)
def test_a_recipe_without_flags_has_none_of_its_engine(engine: str, kind: type) -> None:
    merged = merged_flags(recipe(engine, flags={}))
    assert type(merged) is kind
    assert merged.arguments() == []


def test_every_override_that_a_recipe_may_list_is_one() -> None:
    assert {name.lower() for name in get_args(Override)} == set(Overrides.model_fields)


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        recipe().port = 1
