"""Drafts on the command line: from a draft model, or from the checkpoint's own layers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.launch import Launch, Overrides, plan_launch
from pipeline.serving.recipe.model import RecipeFile

ON = Overrides(enable_eagle3=True)


def launch(engine: str, speculation: dict[str, Any], overrides: Overrides = ON) -> Launch:
    body = {
        "name": "drafts",
        "summary": "a recipe with drafts",
        "backing": "reported",
        "sources": {"seen": {"kind": "report", "title": "a run", "link": "https://example.org"}},
        "engine": engine,
        "image": engine,
        "model": {"repository": "org/model", "file": "model.gguf", "name": "model"},
        "hardware": {"cards": 1, "card": "rtx-pro-6000"},
        "port": 8000,
        "speculation": {"source": "seen", **speculation},
    }
    recipe = RecipeFile.model_validate(body).root
    return plan_launch(recipe, overrides, weights="/weights", draft="/drafts")


def test_draft_layers_of_the_checkpoint_need_no_second_model() -> None:
    start = launch("vllm", {"method": "mtp", "tokens": 3})
    config = json.loads(start.arguments[start.arguments.index("--speculative-config") + 1])
    assert config == {"method": "mtp", "num_speculative_tokens": 3}
    assert [mount.inside for mount in start.mounts] == ["/models"]


def test_a_draft_model_is_mounted_beside_the_weights() -> None:
    start = launch("vllm", {"method": "eagle3", "tokens": 3, "repository": "org/draft"})
    config = json.loads(start.arguments[start.arguments.index("--speculative-config") + 1])
    assert config["model"] == "/draft"
    assert [(m.host, m.inside) for m in start.mounts][1:] == [("/drafts", "/draft")]


def test_settings_of_the_engine_join_the_others() -> None:
    spec = {"method": "dspark", "tokens": 7, "settings": {"draft_sample_method": "probabilistic"}}
    assert '"draft_sample_method":"probabilistic"' in launch("vllm", spec).arguments[-1]


def test_sglang_gets_a_chain_of_drafts_whole() -> None:
    words = launch("sglang", {"method": "nextn", "tokens": 3}).arguments
    chain = words[words.index("--speculative-algorithm") :]
    assert chain == [
        *("--speculative-algorithm", "NEXTN"),
        *("--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    ]


def test_sglang_gets_the_block_of_dspark_and_no_steps() -> None:
    words = launch("sglang", {"method": "dspark", "tokens": 6}).arguments
    assert words[words.index("--speculative-dspark-block-size") + 1] == "6"
    assert "--speculative-num-steps" not in words
    assert "--speculative-draft-model-path" not in words


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_drafts_that_nobody_turned_on_leave_no_word(engine: str) -> None:
    words = launch(engine, {"method": "mtp", "tokens": 3}, Overrides()).arguments
    assert [word for word in words if "speculative" in word] == []


def test_an_engine_without_drafts_says_so() -> None:
    with pytest.raises(RecipeInvalid, match="no draft model"):
        launch("ik-llama", {"method": "mtp", "tokens": 3})
