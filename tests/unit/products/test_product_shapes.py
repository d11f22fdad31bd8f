from __future__ import annotations

from typing import Any

import pytest

from pipeline.core.errors import DoesNotFit, RecipeInvalid
from pipeline.serving.fit.config import architecture_of
from pipeline.serving.fit.facts import fact_of
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.products.model import Product
from pipeline.serving.products.shapes import Sharding, products_of, sharding_of, tokens_of
from pipeline.serving.recipe.model import Recipe
from tests.unit.serve.recipes import recipe

FP8 = {"quant_method": "fp8"}
BLOCK = {**FP8, "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}


def moe(quantization: dict[str, Any] | None) -> Architecture:
    """Qwen3-30B-A3B: 32 heads of 128, 4 of keys and values, 128 experts."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    return architecture_of(
        {**config, **({"quantization_config": quantization} if quantization else {})}
    )


def vllm(**flags: Any) -> Recipe:
    return served("vllm", **flags)


def served(engine: str, **flags: Any) -> Recipe:
    return recipe(
        engine=engine,
        image=engine,
        model={"repository": "a/b", "name": "b"},
        hardware={"cards": 2, "card": "rtx-pro-6000"},
        flags={"ours": flags},
    )


def shapes(found: list[Product]) -> dict[str, tuple[int, int]]:
    return {product.name: (product.n, product.k) for product in found}


def test_tensor_parallelism_divides_rows_of_the_first_and_columns_of_the_second_matrix() -> None:
    found, _ = products_of(moe(BLOCK), Sharding(tensor=2))
    assert shapes(found) == {
        "attention, qkv": ((16 + 2 * 2) * 128, 2048),
        "attention, output": (2048, 16 * 128),
        "experts, gate and up": (768, 2048),
        "experts, down": (2048, 384),
    }
    assert {product.format for product in found} == {"fp8-block"}


def test_with_fewer_heads_of_keys_and_values_than_cards_each_card_has_one() -> None:
    found, _ = products_of(moe(NVFP4), Sharding(tensor=8))
    assert shapes(found)["attention, qkv"] == ((4 + 2) * 128, 2048)


def test_blocks_that_cards_would_cut_have_no_products() -> None:
    with pytest.raises(DoesNotFit, match="96 of an expert's width"):
        products_of(moe(BLOCK), Sharding(tensor=8))


def test_spread_experts_stay_whole_and_are_fewer() -> None:
    found, _ = products_of(moe(NVFP4), Sharding(tensor=4, experts=4))
    experts = next(product for product in found if product.name == "experts, down")
    assert (experts.n, experts.k, experts.experts) == (2048, 768, 32)
    assert experts.visited == 8 / 128


def test_experts_that_are_spread_over_half_of_the_cards_are_halved_too() -> None:
    found, _ = products_of(moe(NVFP4), Sharding(tensor=4, experts=2))
    experts = next(product for product in found if product.name == "experts, down")
    assert (experts.k, experts.experts) == (384, 64)


def test_fp8_without_blocks_is_probed_with_a_scale_for_the_tensor_and_for_each_row() -> None:
    found, _ = products_of(moe(FP8), Sharding())
    assert {product.format for product in found} == {"fp8-tensor", "fp8-channel"}


def test_only_quantised_weights_are_probed_and_the_others_are_named() -> None:
    found, skipped = products_of(moe(NVFP4), Sharding())
    assert [(each.name, each.why) for each in skipped] == [
        ("output head", "their weights are bfloat16")
    ]
    assert {product.format for product in found} == {"nvfp4"}
    assert products_of(moe(None), Sharding())[0] == []


def test_blocks_of_another_size_are_not_taken_for_those_of_128() -> None:
    found, skipped = products_of(moe({**FP8, "weight_block_size": [64, 64]}), Sharding())
    assert found == []
    assert "experts, down" in {each.name for each in skipped}


def test_a_model_that_cannot_be_divided_so_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="attention heads"):
        products_of(moe(NVFP4), Sharding(tensor=3))


def test_kimi_thinking_has_its_experts_in_fp4_and_its_int4_sister_nothing() -> None:
    nvfp4, int4 = (
        fact_of(f"{name}") for name in ("nvidia/Kimi-K2-Thinking-NVFP4", "moonshotai/Kimi-K2.6")
    )
    assert nvfp4 is not None
    assert int4 is not None
    found, _ = products_of(nvfp4.architecture(), Sharding(tensor=8))
    assert shapes(found) == {"experts, gate and up": (512, 7168), "experts, down": (7168, 256)}
    assert products_of(int4.architecture(), Sharding(tensor=8))[0] == []


def test_flags_say_how_a_model_is_divided() -> None:
    assert sharding_of(vllm()) == Sharding(1, 1)
    assert sharding_of(vllm(tensor_parallel_size=4)) == Sharding(4, 1)
    spread = vllm(tensor_parallel_size=4, data_parallel_size=2, enable_expert_parallel=True)
    assert sharding_of(spread) == Sharding(4, 8)
    assert sharding_of(served("sglang", tensor_parallel_size=8, ep_size=4)) == Sharding(8, 4)


def test_a_recipe_of_llama_cpp_is_refused() -> None:
    with pytest.raises(RecipeInvalid, match="llama-cpp"):
        sharding_of(recipe())


def test_the_batch_of_a_recipe_is_among_the_numbers_of_tokens() -> None:
    assert tokens_of(vllm()) == [1, 16, 64, 1024]
    assert tokens_of(vllm(max_num_seqs=24)) == [1, 16, 24, 64, 1024]
    assert tokens_of(served("sglang", max_running_requests=64)) == [1, 16, 64, 1024]
