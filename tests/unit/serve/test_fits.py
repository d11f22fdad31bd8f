from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.known import Unknown, unknown
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.fit.placement import FitMachine
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import Overrides
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.fits import FitPlan, find_served_model, model_in, plan_fit, shortfall
from pipeline.serving.serve.weights import HostProof, WeightsFolder
from tests.unit.support import ROOT

GIB = 1 << 30
# nvidia-smi shows 97,887 MiB of an RTX PRO 6000
CARD = 97_887 << 20
CHECKOUT = Checkout(ROOT)
SHIPPED = Recipes([ROOT / "recipes"])


def wanted(name: str, **overrides: Any) -> FitPlan:
    recipe = SHIPPED.read(name)
    return plan_fit(recipe, Overrides(**overrides), find_served_model(recipe, None, CHECKOUT))


def judged(name: str, room: FitMachine | None = None, **overrides: Any) -> object:
    recipe = SHIPPED.read(name)
    host = (recipe.hardware.host_memory_gib or 0) * GIB or None
    own = FitMachine(recipe.hardware.cards, CARD, 0, host)
    return shortfall(wanted(name, **overrides), room or own)


@pytest.mark.parametrize(
    "name",
    [
        # what was really run, and what the documents say of these cards
        "kimi-k2-thinking-nvfp4-sglang-8x",
        "kimi-k25-int4-sglang-8x",
        "kimi-k26-sglang-8x",
        "kimi-k26-vllm-8x",
        "kimi-k26-ik-llama-2x",
        "kimi-k26-ik-llama-2x-cpu-moe",
        "kimi-k26-ik-llama-2x-q4-x",
    ],
)
def test_a_document_s_recipe_fits_the_cards_that_it_was_run_on(name: str) -> None:
    assert judged(name) == ""


@pytest.mark.parametrize(
    ("name", "room", "overrides", "words"),
    [
        ("kimi-k26-vllm-8x", FitMachine(8, CARD * 3 // 4, 0), {}, "the weights alone exceed"),
        ("kimi-k26-vllm-8x", FitMachine(8, CARD // 2, 0), {}, "the weights alone exceed"),
        ("kimi-k26-vllm-8x", FitMachine(7, CARD, 0), {}, "divided among 8 cards, there are 7"),
        ("kimi-k26-vllm-8x", None, {"max_model_len": 10_000_000}, "only 262144 positions"),
        ("kimi-k26-vllm-8x", None, {"gpu_memory_utilization": 0.5}, "the weights alone exceed"),
        ("kimi-k26-sglang-8x", None, {"max_model_len": 262_144}, "tokens"),
        ("kimi-k26-sglang-8x", FitMachine(4, CARD, 0), {}, "divided among 8 cards"),
        ("kimi-k26-sglang-8x", FitMachine(8, CARD // 2, 0), {}, "the weights alone exceed"),
        (
            "kimi-k25-int4-sglang-8x",
            FitMachine(8, CARD * 3 // 4, 0),
            {},
            "the weights alone exceed",
        ),
        (
            "kimi-k2-thinking-nvfp4-sglang-8x",
            FitMachine(8, CARD // 2, 0),
            {},
            "the weights alone exceed",
        ),
        ("kimi-k26-ik-llama-2x", FitMachine(2, CARD // 8, 0, 768 * GIB), {}, "CUDA0 is short of"),
        ("kimi-k26-ik-llama-2x", FitMachine(2, CARD, 0, 100 * GIB), {}, "the host is short of"),
        (
            "kimi-k26-ik-llama-2x-q4-x",
            FitMachine(2, CARD, 0, 256 * GIB),
            {},
            "the host is short of",
        ),
        (
            "kimi-k26-ik-llama-2x-cpu-moe",
            FitMachine(2, CARD, 0, 256 * GIB),
            {},
            "the host is short of",
        ),
    ],
)
def test_smaller_or_fewer_cards_and_longer_contexts_do_not_fit(
    name: str, room: FitMachine | None, overrides: dict[str, Any], words: str
) -> None:
    short = judged(name, room, **overrides)
    assert isinstance(short, str)
    assert words in short


def with_flags(recipe: Recipe, **flags: Any) -> Recipe:
    body = recipe.model_dump()
    first = next(iter(body["flags"]))
    body["flags"][first] |= flags
    return type(recipe).model_validate(body)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("kimi-k26-vllm-8x", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ("kimi-k26-vllm-8x", {"cpu_offload_gb": 50}, "--cpu-offload-gb"),
        ("kimi-k26-ik-llama-2x", {"gpu_layers": 10}, "all 61 layers"),
        ("kimi-k26-ik-llama-2x", {"cache_type_k": "q4_0"}, "KV cache"),
        ("kimi-k26-ik-llama-2x", {"override_tensor": ["exps=CUDA9"]}, "no device"),
    ],
)
def test_what_is_not_calculated_is_unknown_and_never_fits(
    name: str, flags: dict[str, Any], words: str
) -> None:
    recipe = SHIPPED.read(name)
    model = find_served_model(recipe, None, CHECKOUT)
    plan = plan_fit(with_flags(recipe, **flags), Overrides(), model)
    short = shortfall(plan, FitMachine(8, 10 * CARD, 0, 9999 * GIB))
    assert isinstance(short, Unknown)
    assert words in short.unknown


@pytest.mark.parametrize(("mode", "fits"), [(0, False), (1, True), (2, True), (3, True)])
def test_the_mla_mode_of_a_recipe_is_calculated(mode: int, fits: bool) -> None:
    recipe = SHIPPED.read("kimi-k26-ik-llama-2x")
    model = find_served_model(recipe, None, CHECKOUT)
    plan = plan_fit(with_flags(recipe, mla=mode), Overrides(), model)
    short = shortfall(plan, FitMachine(2, CARD, 0, 768 * GIB))
    assert ("CUDA0 is short of" in str(short)) != fits


def test_a_draft_that_nobody_calculates_is_unknown_but_what_does_not_fit_fails() -> None:
    assert isinstance(judged("kimi-k26-vllm-8x", enable_eagle3=True), Unknown)
    short = judged("kimi-k26-vllm-8x", FitMachine(8, CARD // 2, 0), enable_eagle3=True)
    assert isinstance(short, str)
    assert short


def test_a_model_that_nothing_is_known_about_is_unknown(tmp_path: Path) -> None:
    recipe = SHIPPED.read("gpt-oss-120b-vllm-1x")
    assert isinstance(find_served_model(recipe, None, CHECKOUT), Unknown)
    assert isinstance(find_served_model(recipe, tmp_path, CHECKOUT), Unknown)
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    assert isinstance(find_served_model(recipe, tmp_path, CHECKOUT), Unknown)
    plan = plan_fit(recipe, Overrides(), unknown("nobody looked"))
    assert shortfall(plan, FitMachine(1, 999 * GIB, 0)) == unknown("nobody looked")


def test_weights_on_another_host_are_known_by_their_config_only() -> None:
    """A folder of that host is none of this machine's, even where the paths are the same."""
    recipe = SHIPPED.read("gpt-oss-120b-vllm-1x")
    there = WeightsFolder(Path("/"), proof=HostProof(good=True), config='{"model_type": "x"}')
    assert isinstance(model_in(recipe, there, CHECKOUT), Unknown)
    assert isinstance(model_in(recipe, replace(there, config="not JSON"), CHECKOUT), Unknown)
    kimi = SHIPPED.read("kimi-k26-vllm-8x")
    without = WeightsFolder(Path("/"), proof=HostProof(good=True))
    assert not isinstance(model_in(kimi, without, CHECKOUT), Unknown)
