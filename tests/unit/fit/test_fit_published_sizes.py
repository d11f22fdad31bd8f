"""Models whose configs name their parts in ways of their own, beside the sizes that were published.

A sum that takes experts for a dense model, or leaves a part out, is far from these.
"""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.core.errors import ModelUnreadable
from pipeline.serving.fit.config import architecture_of
from pipeline.serving.fit.engine import kv_token_bytes
from pipeline.serving.fit.parts import tensor_parts
from pipeline.serving.fit.shape import Gqa, Linear
from tests.unit.fit.test_fit_config import LLAMA

Config = dict[str, Any]
BASE: Config = {
    "dtype": "bfloat16",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def every(n: int, layers: int, first: int = 0) -> list[str]:
    """Full attention in every n-th layer, a window in the others."""
    kinds = ("full_attention", "sliding_attention")
    return [kinds[(i - first) % n != 0] for i in range(layers)]


# arcee-ai/Trinity-*: fields of transformers' afmoe; sizes of their technical report
TRINITY_MINI: Config = BASE | {
    "architectures": ["AfmoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "sliding_window": 2048,
    "layer_types": every(4, 32, 3),
    "vocab_size": 200192,
}
TRINITY_LARGE = TRINITY_MINI | {
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_dense_layers": 6,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_experts": 256,
    "num_experts_per_tok": 4,
    "layer_types": every(4, 60, 3),
}
# baidu/ERNIE-4.5-21B-A3B and -300B-A47B: fields of transformers' ernie4_5_moe
ERNIE_21B: Config = BASE | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_k": 6,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "vocab_size": 103424,
    "tie_word_embeddings": True,
}
ERNIE_300B = ERNIE_21B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "moe_intermediate_size": 3584,
    "num_hidden_layers": 54,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "moe_num_shared_experts": 0,
    "moe_k": 8,
    "moe_layer_start_index": 3,
    "moe_layer_end_index": 53,
    "tie_word_embeddings": False,
}
# meta-llama/Llama-4-*: 109B and 402B in transformers' documentation of llama4
SCOUT: Config = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 262144,
        "attention_chunk_size": 8192,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "moe_layers": list(range(48)),
        "vocab_size": 202048,
    },
}
MAVERICK = SCOUT | {
    "text_config": {
        **{k: v for k, v in SCOUT["text_config"].items() if k != "moe_layers"},
        "interleave_moe_layer_step": 2,
        "num_local_experts": 128,
    }
}
# swiss-ai/Apertus-8B, as a test of ollama/ollama has its config
APERTUS: Config = BASE | {
    "architectures": ["ApertusForCausalLM"],
    "hidden_act": "xielu",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 131072,
}
# stepfun-ai/Step-3.5-Flash: 196.81B in its README
STEP: Config = BASE | {
    "architectures": ["Step3p5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1280,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "share_expert_dim": 1280,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "layer_types": every(4, 45),
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
    "sliding_window": 512,
    "vocab_size": 128896,
}
# google/gemma-4-*: 30.7B and 25.2B in its model card
GEMMA_31B: Config = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "max_position_embeddings": 262144,
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": every(6, 60, 5),
        "sliding_window": 1024,
        "num_experts": None,
        "enable_moe_block": False,
        "vocab_size": 262144,
    },
}
GEMMA_26B = GEMMA_31B | {
    "text_config": GEMMA_31B["text_config"]
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "layer_types": every(6, 30, 5),
        "num_experts": 128,
        "top_k_experts": 8,
        "enable_moe_block": True,
    }
}
# LiquidAI/LFM2.5-8B-A1B: 16.9 GB of bf16
LFM: Config = BASE | {
    "architectures": ["Lfm2MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "conv_L_cache": 3,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "vocab_size": 128000,
    "tie_word_embeddings": True,
}

# ai21labs/AI21-Jamba-1.5-Mini: its config.json; the model card says 52B
JAMBA: Config = BASE | {
    "architectures": ["JambaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "vocab_size": 65536,
}


def weights(config: Config) -> int:
    return sum(p.count * p.weights for p in tensor_parts(architecture_of(config)) if p.in_file)


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (TRINITY_MINI, 26),
        (TRINITY_LARGE, 400),
        (ERNIE_21B, 21.8),
        (ERNIE_300B, 300),
        (SCOUT, 109),
        (MAVERICK, 402),
        (APERTUS, 8),
        (STEP, 196.81),
        (GEMMA_31B, 30.7),
        (GEMMA_26B, 25.2),
        (LFM, 8.45),
        (JAMBA, 51.6),
    ],
)
def test_a_config_with_names_of_its_own_is_as_large_as_published(
    config: Config, billions: float
) -> None:
    # without a vision tower, which two of them have; cards round to whole billions
    assert weights(config) / 1e9 == pytest.approx(billions, rel=0.015)


def test_layers_without_a_window_keep_heads_of_their_own() -> None:
    # ten layers of four heads of 512; the others have a window, which costs a request
    assert kv_token_bytes(architecture_of(GEMMA_31B), 1, "bf16") == 10 * 2 * 4 * 512 * 2


def test_layers_with_a_window_keep_heads_of_their_own() -> None:
    by_window = {bool(m.window): m.attention for m in architecture_of(STEP).mixers}
    full, window = by_window[False], by_window[True]
    assert isinstance(full, Gqa)
    assert isinstance(window, Gqa)
    assert (full.heads, full.kv_heads, window.heads, window.kv_heads) == (64, 8, 96, 8)


@pytest.mark.parametrize("key", ["num_moe_experts", "n_experts", "expert_num", "ffn_num_experts"])
def test_experts_under_an_unknown_name_are_not_taken_for_a_model_without(key: str) -> None:
    with pytest.raises(ModelUnreadable, match=f"{key}: experts are not known under this name"):
        architecture_of(LLAMA | {key: 64})


@pytest.mark.parametrize("rest", [{"num_experts": 0}, {"num_experts_per_tok": 2}, {"n_experts": 1}])
def test_what_is_left_of_experts_in_a_dense_config_is_no_reason_to_refuse_it(rest: Config) -> None:
    assert weights(LLAMA | rest) == weights(LLAMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_layers_enum": "3,4,x"}, "moe_layers_enum: is not a list"),
        ({"moe_layers_enum": "99"}, "0 of 45 layers have experts"),
        ({"moe_layers_enum": None, "moe_layers": ["a"]}, "moe_layers: is not a list"),
        ({"attention_other_setting": 4}, "attention_other_setting: is not a JSON object"),
        ({"share_expert_dim": "many"}, "share_expert_dim: 'many' is not a count"),
    ],
)
def test_layers_that_cannot_be_are_refused(change: Config, message: str) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        architecture_of(STEP | change)


ESCAPE = "\x1b[31m" + "x" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": ESCAPE},
        {"hidden_size": ESCAPE, "text_config": LLAMA},
        {"tie_word_embeddings": ESCAPE},
        {"num_experts": 4, "num_experts_per_tok": list(range(100_000))},
        {"num_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": ESCAPE},
        {"layer_types": [ESCAPE] * 32},
        {"torch_dtype": ESCAPE},
        {"vision_config": {"depth": ESCAPE}},
        {"quantization_config": {"quant_method": ESCAPE}},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": ESCAPE}},
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": ESCAPE}},
    ],
)
def test_a_value_is_told_briefly_and_without_escape_codes(change: Config) -> None:
    try:
        texts = architecture_of(LLAMA | change).bounds
    except ModelUnreadable as error:
        texts = [str(error)]
    assert texts
    assert all(text.isprintable() and len(text) < 300 for text in texts)


def test_one_layer_of_eight_keeps_tokens_and_the_others_a_state() -> None:
    model = architecture_of(JAMBA)
    assert [mixer.layers for mixer in model.mixers] == [4, 28]
    assert isinstance(model.mixers[1].attention, Linear)
    assert kv_token_bytes(model, 1, "bf16") == 4 * 2 * 8 * 128 * 2
    assert model.bounds == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"recurrent_layer_period": 3}, "recurrent_layer_period"),
        ({"attention_block_types": ["a", "b"]}, "attention_block_types"),
        ({"global_attn_interval": 6}, "global_attn_interval"),
        ({"recurrent_layer_period": 1}, ""),
        ({"layer_norm_eps": 1e-5}, ""),
        ({"attention_block_types": None}, ""),
    ],
)
def test_a_pattern_of_layers_that_is_not_understood_is_named(change: Config, named: str) -> None:
    bounds = [text for text in architecture_of(LLAMA | change).bounds if "pattern" in text]
    assert len(bounds) == bool(named)
    assert all(named in text and "is not understood" in text for text in bounds)


def test_windows_of_a_pattern_of_numbers_are_windows() -> None:
    windows = {"sliding_window": 128, "hybrid_layer_pattern": [0, 1, 1, 1] * 8}
    model = architecture_of(LLAMA | windows | {"swa_num_key_value_heads": 16})
    assert [(mixer.layers, mixer.window) for mixer in model.mixers] == [(8, 0), (24, 128)]
    assert kv_token_bytes(model, 1, "bf16") == 8 * 2 * 8 * 128 * 2
    with pytest.raises(ModelUnreadable, match="hybrid_layer_pattern: 2 of 32 layers"):
        architecture_of(LLAMA | windows | {"hybrid_layer_pattern": [0, 1]})


def test_a_dense_part_beside_the_experts_of_every_layer_is_counted() -> None:
    moe = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    both = weights(LLAMA | moe | {"residual_moe": True})
    assert both - weights(LLAMA | moe) == pytest.approx(32 * 3 * 4096 * 14336, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "tied"),
    [
        ({"model_type": "cohere2"}, True),
        ({"model_type": "gemma3_text"}, True),
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, False),
        ({"model_type": "llama"}, False),
    ],
)
def test_a_head_that_is_the_embedding_by_default_is_counted_once(
    change: Config, tied: bool
) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"} | change
    assert architecture_of(config).tied is tied


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_outer_config_says_what_the_inner_one_leaves_out(key: str) -> None:
    text = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}
    outer = {"architectures": ["SomeForConditionalGeneration"], "tie_word_embeddings": True}
    assert architecture_of(outer | {key: text}).tied


def test_tables_that_every_layer_looks_up_are_counted() -> None:
    more = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 1000}
    assert weights(LLAMA | more) - weights(LLAMA) == 32 * 256 * 1000


def test_mamba_is_read_under_either_family_of_names() -> None:
    sizes = {"n_heads": 128, "d_head": 64, "d_state": 128, "n_groups": 1, "d_conv": 4}
    granite = {f"mamba_{key}": value for key, value in sizes.items()}
    other = dict(
        zip(
            ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
            sizes.values(),
            strict=True,
        )
    )
    kinds = {"layer_types": ["mamba"] * 31 + ["attention"]}
    one, two = (architecture_of(LLAMA | kinds | names) for names in (granite, other))
    assert one.mixers == two.mixers
    assert isinstance(one.mixers[1].attention, Linear)
