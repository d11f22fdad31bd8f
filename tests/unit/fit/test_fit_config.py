from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DoesNotFit, ModelUnreadable
from pipeline.serving.fit.answer import answer
from pipeline.serving.fit.config import architecture_of, read_model_config
from pipeline.serving.fit.engine import (
    KERNELS_BYTES,
    FitQuestion,
    kv_token_bytes,
    later_sglang_fraction,
    margin_bytes,
    request_bytes,
    room_of,
    sglang_default_fraction,
    shown_bytes,
    state_bytes,
)
from pipeline.serving.fit.facts import ModelFact, all_facts, fact_of
from pipeline.serving.fit.parts import require_divisible, tensor_parts
from pipeline.serving.fit.shape import Architecture, Gqa, Mla
from pipeline.serving.fit.units import GIB, read_card_size, read_size, read_tokens

# the shape of a published Llama-3.1-8B config.json
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
QWEN_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def kimi() -> dict[str, Any]:
    fact = fact_of("moonshotai/Kimi-K2.6")
    assert fact is not None
    return copy.deepcopy(fact.config)


def file_bytes(model: Architecture) -> int:
    return sum(part.file_bytes() for part in tensor_parts(model))


def test_every_shipped_fact_is_a_whole_architecture_with_a_source() -> None:
    facts = all_facts()
    assert len({r for f in facts for r in f.repositories}) == sum(
        len(f.repositories) for f in facts
    )
    assert all(fact.architecture().layers > 20 and len(fact.source) > 80 for fact in facts)


def test_kimi_is_read_through_its_text_config_with_only_its_experts_quantised() -> None:
    model = architecture_of(kimi())
    assert isinstance(model.attention, Mla)
    assert model.moe is not None
    assert (model.moe.experts, model.moe.layers, model.dense_layers) == (384, 60, 1)
    precision = model.precision
    assert precision.experts.name == "int4"
    others = (precision.attention, precision.shared, precision.dense, precision.head)
    assert {scheme.name for scheme in others} == {"bfloat16"}


def test_a_token_of_mla_costs_the_same_on_any_number_of_cards() -> None:
    model = architecture_of(kimi())
    assert kv_token_bytes(model, 1, "bf16") == kv_token_bytes(model, 8, "bf16") == 576 * 61 * 2
    assert kv_token_bytes(model, 8, "fp8") == 576 * 61


def test_a_llama_has_eight_billion_weights_and_divides_its_cache() -> None:
    model = architecture_of(LLAMA)
    assert isinstance(model.attention, Gqa)
    assert file_bytes(model) == 2 * 8_030_261_248
    assert kv_token_bytes(model, 1, "bf16") == 131_072
    assert kv_token_bytes(model, 8, "bf16") == 16_384
    assert kv_token_bytes(model, 16, "bf16") == 16_384  # more cards than heads: each has one


def test_a_deepseek_v3_has_671_billion_weights() -> None:
    config = kimi()["text_config"] | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    parts = [part for part in tensor_parts(architecture_of(config)) if part.in_file]
    assert sum(part.count * part.weights for part in parts) == 671_026_419_200
    assert next(p for p in parts if p.name == "router").scheme.name == "bfloat16"


def test_a_qwen_moe_needs_no_dense_layer_and_no_shared_expert() -> None:
    model = architecture_of(QWEN_MOE)
    names = {part.name.partition(",")[0] for part in tensor_parts(model)}
    assert "experts" in names
    assert not names & {"dense", "shared experts", "vision tower"}


def test_layers_for_multi_token_prediction_are_reported_as_not_counted() -> None:
    config = kimi()
    config["text_config"]["num_nextn_predict_layers"] = 1
    notes = answer(architecture_of(config), asked(fraction=0.85)).notes
    assert any("multi-token prediction" in note for note in notes)


def quantised(**quant: Any) -> Architecture:
    return architecture_of(LLAMA | {"quantization_config": quant})


def test_each_known_quantisation_has_its_own_bytes() -> None:
    weights = 4096 * 14336
    want = {
        weights // 2 + weights // 128 * 5 // 2: quantised(
            quant_method="awq", bits=4, group_size=128
        ),
        weights + weights // 128**2 * 4: quantised(
            quant_method="fp8", weight_block_size=[128, 128]
        ),
        weights // 2 + weights // 16: quantised(quant_method="modelopt", quant_algo="NVFP4"),
    }
    for n_bytes, model in want.items():
        down = next(part for part in tensor_parts(model) if part.name == "dense, down")
        assert down.file_bytes() == 32 * n_bytes, model.precision.dense.name


def test_symmetric_int4_has_scales_and_asymmetric_a_zero_point_as_well() -> None:
    config = kimi()
    one = architecture_of(config)
    group = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    group["symmetric"] = False
    other = architecture_of(config)
    experts = 60 * 384 * 3 * 7168 * 2048
    assert file_bytes(other) - file_bytes(one) == experts // 32 // 2


def test_modules_to_leave_alone_are_found_by_every_spelling() -> None:
    for ignore in (
        ["*self_attn*"],
        ["re:.*self_attn"],
        ["language_model.model.layers.1.self_attn*"],
    ):
        model = quantised(quant_method="modelopt", quant_algo="NVFP4", ignore=ignore)
        assert model.precision.attention.name == "bfloat16", ignore
        assert model.precision.dense.name == "nvfp4"


def test_a_quantisation_beside_the_config_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    beside = json.dumps({"quantization": quantization | {"exclude_modules": ["lm_head"]}})
    (tmp_path / "hf_quant_config.json").write_text(beside)
    model = read_model_config(tmp_path / "config.json")
    assert model.precision.kv_fp8
    assert (model.precision.dense.name, model.precision.head.name) == ("nvfp4", "bfloat16")


MISSING = ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "torch_dtype"]


@pytest.mark.parametrize("key", [*MISSING, "max_position_embeddings", "architectures"])
def test_a_missing_field_is_named(key: str) -> None:
    config = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ModelUnreadable, match=key.removeprefix("torch_")):
        architecture_of(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": "LlamaForCausalLM"}, "exactly one"),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "exactly one"),
        ({"hidden_size": -4096}, "not a count"),
        ({"hidden_size": 1 << 40}, "not a count"),
        ({"hidden_size": True}, "not a count"),
        ({"hidden_size": "4096"}, "not a count"),
        ({"hidden_size": 4097}, "do not divide"),
        ({"num_key_value_heads": 5}, "does not divide"),
        ({"use_sliding_window": True}, "sliding_window: is missing"),
        ({"layer_types": ["linear_attention"] * 32}, "numbers of a known kind"),
        ({"layer_types": ["full_attention"] * 31}, "31 are listed, of 32"),
        ({"layer_types": [3]}, "not a list of names"),
        ({"hybrid_override_pattern": "M*X"}, "'X' is not known"),
        ({"torch_dtype": "int2"}, "dtype"),
        ({"tie_word_embeddings": "no"}, "neither true nor false"),
        ({"text_config": []}, "text_config"),
        ({"text_config": LLAMA | {"hidden_size": 2048}}, "4096 at the top and 2048"),
        ({"quantization_config": "int4"}, "not a JSON object"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "is not a group size"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": ["re:("]}}, "ignore"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": 3}}, "not a list"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}, "group"),
    ],
)
def test_a_config_that_contradicts_itself_or_is_strange_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        architecture_of(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "magic"}}, "'magic' is not known; weights are"),
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "3 bits are not known"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8"}}, "W4A8"),
        ({"layer_types": ["new_attention"] * 32}, "'new_attention' are not known: counted as"),
        ({"sliding_window": 4096}, "which layers have it is not said"),
        ({"vision_config": {"patches": 3}}, "The vision tower is not counted"),
    ],
)
def test_a_part_that_is_not_known_is_bounded_with_its_reason(
    change: dict[str, Any], reason: str
) -> None:
    plain, bounded = architecture_of(LLAMA), architecture_of(LLAMA | change)
    assert reason in bounded.bounds[0]
    assert not plain.bounds
    assert reason in "\n".join(answer(bounded, asked()).notes)
    # on the side that needs more
    assert file_bytes(bounded) == file_bytes(plain)
    assert kv_token_bytes(bounded, 8, "bf16") == kv_token_bytes(plain, 8, "bf16")


# what publishers and engines count; a sum that leaves a part out or doubles one misses these
@pytest.mark.parametrize(
    ("repository", "billions"),
    [
        ("zai-org/GLM-4.5", 352.8),
        ("zai-org/GLM-4.5-Air", 106.8),
        ("zai-org/GLM-5", 744),
        ("openai/gpt-oss-120b", 116.83),  # ollama/ollama#18373: model params
        ("MiniMaxAI/MiniMax-M2", 228.7),
        ("deepseek-ai/DeepSeek-V3.2", 671),
        ("deepseek-ai/DeepSeek-V4-Flash", 284.33),  # ggml-org/llama.cpp#22319: model params
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 80),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 49.1),
    ],
)
def test_parts_of_models_of_today_add_up_to_their_published_size(
    repository: str, billions: float
) -> None:
    fact = fact_of(repository)
    assert fact is not None
    weights = sum(p.count * p.weights for p in tensor_parts(fact.architecture()) if p.in_file)
    assert weights / 1e9 == pytest.approx(billions, rel=0.005)


def model_of(repository: str) -> Architecture:
    fact = fact_of(repository)
    assert fact is not None
    return fact.architecture()


def test_every_kind_of_attention_has_its_own_cost_of_a_token() -> None:
    # a latent of 512 with 4 scales and 64 positions in 16 bits, and 132 bytes of an indexer
    assert kv_token_bytes(model_of("deepseek-ai/DeepSeek-V3.2"), 8, "fp8") == 61 * (656 + 132)
    assert kv_token_bytes(model_of("nvidia/GLM-5.2-NVFP4"), 8, "fp8") == 78 * 656 + 21 * 132
    # a window costs a request, not a token
    oss = model_of("openai/gpt-oss-120b")
    assert kv_token_bytes(oss, 1, "bf16") == 18 * 2 * 8 * 64 * 2
    assert request_bytes(oss, 1, "bf16", 131072) == 18 * 128 * 2 * 8 * 64 * 2
    assert request_bytes(oss, 1, "bf16", 64) == 18 * 64 * 2 * 8 * 64 * 2
    asking = asked(engine="vllm", tp=1, context=131072, prefill_given=8192)
    # vLLM keeps all tokens of a prefill step beside it
    assert room_of(oss, 0, asking).request_bytes == 18 * (127 + 8192) * 2 * 8 * 64 * 2
    # a state, too: 36 layers of 32 heads of 128 x 128, and 3 steps of their convolution
    qwen = model_of("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert kv_token_bytes(qwen, 1, "bf16") == 12 * 2 * 2 * 256 * 2
    assert request_bytes(qwen, 1, "bf16", 4096) == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert room_of(qwen, 0, asking).request_bytes == 2 * state_bytes(
        qwen, 1
    )  # one for its prefix cache
    assert state_bytes(qwen, 4) == 36 * (8 * 128 * 128 * 4 + 2048 * 3 * 2)


def test_latent_experts_and_gates_of_kimi_k3_are_parts_of_their_own() -> None:
    # small numbers in the fields that vLLM 0.32.0 reads of kimi_k3 (transformers_utils/configs)
    text = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 2,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 48,
        "first_k_dense_replace": 1,
    }
    config = {"architectures": ["KimiK3ForConditionalGeneration"], "dtype": "bfloat16"}
    model = architecture_of(config | {"text_config": text})
    sizes = {part.name: part.weights for part in tensor_parts(model)}
    assert sizes["experts, down"] == 8 * 48 * 32
    assert sizes["experts, latent"] == 2 * 64 * 48
    assert sizes["shared experts, down"] == 64 * 2 * 32
    assert sizes["attention, gate"] == sizes["attention, output"] == 2 * 8 * 64
    # queries, keys, values, gate and output; the decay's second step; b; convolutions; two vectors
    assert sizes["linear attention"] == 5 * 64 * 16 + 8 * 16 + 64 * 2 + 3 * 16 * 4 + 2 * 16
    assert [(m.layers, m.attention.kind) for m in model.mixers] == [(1, "mla"), (3, "linear")]
    assert model.dense_layers == 1
    assert model.bounds == []


def test_a_vision_tower_is_read_under_either_family_of_names() -> None:
    # defaults of transformers 5.22.2, configuration_qwen3_5.py
    tower = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    tower |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
    model = architecture_of(LLAMA | {"vision_config": tower})
    assert model.vision is not None
    blocks = 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    merger = 4608 * 4608 + 4608 * 4096
    assert model.vision.parameters(4096) == pytest.approx(blocks + merger, rel=0.02)
    assert model.vision.rated_layers == 24  # sglang looks for a field that these do not have
    assert model.bounds == []


def test_tokens_of_a_hybrid_model_are_counted_in_requests_by_vllm_and_beside_states_by_sglang() -> (
    None
):
    qwen = model_of("Qwen/Qwen3-Next-80B-A3B-Instruct")
    short, long = (
        answer(qwen, asked(engine="vllm", tp=2, context=n)).room.kv_tokens for n in (4096, 262144)
    )
    assert short < 0.7 * long  # states are most of a short request
    room = answer(qwen, asked(tp=2)).room
    assert room.kv_part == pytest.approx(1 / 1.9)
    assert room.kv_tokens == int(room.kv_bytes * room.kv_part // room.kv_token_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 500}, "500 of only 384"),
        ({"first_k_dense_replace": 61}, "61 dense layers of 61"),
        ({"first_k_dense_replace": -1}, "-1 dense layers"),
        ({"moe_layer_freq": 2}, "every layer"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"q_lora_rank": "1536"}, "q_lora_rank"),
        ({"n_shared_experts": -1}, "number of shared experts"),
        ({"num_nextn_predict_layers": -1}, "predictors"),
        ({"quantization_config": {"quant_method": "fp8"}}, "disagree"),
    ],
)
def test_experts_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    config = kimi()
    config["text_config"] |= change
    with pytest.raises(ModelUnreadable, match=message):
        architecture_of(config)


STRANGE: tuple[Any, ...] = (
    None,
    [],
    {},
    "x",
    -1,
    0,
    2.5,
    True,
    1 << 40,
    [None],
    [[]],
    {"a": []},
    ["x"],
    [-1],
)


@pytest.mark.parametrize("fact", all_facts(), ids=lambda fact: fact.repositories[0])
def test_a_strange_value_in_any_field_is_read_or_refused_and_never_a_crash(fact: ModelFact) -> None:
    outer = fact.config.get("text_config", {})
    tables = [(fact.config, ()), (outer, ("text_config",))]
    tables += [(t, (k,)) for k, t in fact.config.items() if isinstance(t, dict)]
    refused = 0
    for fields, path in tables:
        for key, value in ((key, value) for key in fields for value in STRANGE):
            config = copy.deepcopy(fact.config)
            inner = config
            for step in path:
                inner = inner[step]
            inner[key] = value
            try:
                architecture_of(config)
            except ModelUnreadable:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"architectures": 3}', "[" * 100_000])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelUnreadable):
        read_model_config(path)


@pytest.mark.parametrize(("cards", "message"), [(7, "64 cannot"), (128, "64 cannot"), (3, "heads")])
def test_cards_that_do_not_divide_the_heads_are_refused(cards: int, message: str) -> None:
    model = architecture_of(kimi())
    with pytest.raises(DoesNotFit, match=message) as refused:
        require_divisible(model, cards)
    possible = re.search(r"--tp (\d+) is possible", refused.value.hint)
    assert possible is not None
    assert int(possible[1]) < cards
    require_divisible(model, int(possible[1]))


def test_experts_of_mxfp4_are_rounded_up_and_not_refused() -> None:
    # vllm-project/vllm#51590: gpt-oss-120b on eight cards, 360 of an expert's 2,880 on each
    require_divisible(model_of("openai/gpt-oss-120b"), 8)


def test_cards_that_would_cut_a_group_are_refused() -> None:
    config = kimi()
    config["text_config"]["moe_intermediate_size"] = 384
    with pytest.raises(DoesNotFit, match="groups of 32"):
        require_divisible(architecture_of(config), 8)


# the numbers that decide in the published config.json of Qwen/Qwen3-235B-A22B-FP8
QWEN_235B_FP8 = QWEN_MOE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "moe_intermediate_size": 1536,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def test_blocks_of_fp8_that_cards_would_cut_are_refused_as_engines_do() -> None:
    model = architecture_of(QWEN_235B_FP8)
    with pytest.raises(DoesNotFit, match="192 of an expert's width on a card cut its blocks") as it:
        require_divisible(model, 8)
    assert "--tp 4 is possible" in it.value.hint
    require_divisible(model, 4)
    narrow = architecture_of(QWEN_235B_FP8 | {"head_dim": 64})
    with pytest.raises(DoesNotFit, match="64 of its keys on a card cut its blocks of 128"):
        require_divisible(narrow, 4)
    dense = {"intermediate_size": 17408, "quantization_config": {"quant_method": "fp8"}}
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    require_divisible(architecture_of(LLAMA | dense), 16)
    with pytest.raises(DoesNotFit, match="1088 of its dense width"):
        require_divisible(architecture_of(LLAMA | dense | {"quantization_config": blocks}), 16)


def asked(**changes: Any) -> FitQuestion:
    values = {"card_bytes": shown_bytes(96 * GIB), "tp": 8, "context": 65536, "engine": "sglang"}
    return FitQuestion.model_validate(values | changes)


def test_a_model_that_fits_says_so_and_one_that_is_short_says_by_how_much() -> None:
    model = architecture_of(kimi())
    assert answer(model, asked(fraction=0.85)).short == ""
    assert "4,277 tokens, 65,536 asked for" in answer(model, asked()).short
    assert "weights alone" in answer(model, asked(card_bytes=48 * GIB)).short


def test_too_close_to_promise_is_not_taken_for_a_fit() -> None:
    model = architecture_of(kimi())
    room = answer(model, asked(fraction=0.85)).room
    between = asked(fraction=0.85, context=room.tokens_at(margin_bytes(asked(), 0) // 2))
    assert "too close to promise" in answer(model, between).short
    measured = between.model_copy(update={"measured_bytes": room.weights_bytes + KERNELS_BYTES})
    assert answer(model, measured).short == ""


def test_the_share_that_is_suggested_is_one_that_fits() -> None:
    model = architecture_of(kimi())
    for engine in ("sglang", "vllm"):
        notes = answer(model, asked(engine=engine, fraction=0.78)).notes
        needed = next(float(note.split()[1]) for note in notes if "their room" in note)
        assert answer(model, asked(engine=engine, fraction=needed)).short == ""
        assert answer(model, asked(engine=engine, fraction=needed - 0.002)).short != ""


def test_a_share_that_leaves_nothing_for_activations_does_not_fit() -> None:
    model = architecture_of(kimi())
    assert "activations need" in answer(model, asked(fraction=0.99)).short


@pytest.mark.parametrize("changes", [{"card_bytes": GIB}, {"prefill_given": 1 << 24}])
def test_a_card_with_less_than_sglang_leaves_free_has_no_share_at_all(
    changes: dict[str, Any],
) -> None:
    result = answer(architecture_of(kimi()), asked(**changes))
    assert result.room.fraction == 0
    by_gib = (result.room.weights_bytes + KERNELS_BYTES) / GIB
    assert f"exceed the engine's share of a card by {by_gib:,.2f} GiB" in result.short


@pytest.mark.parametrize(
    ("kv_heads", "tp", "dcp", "hint"),
    [
        (8, 8, 8, "leave --dcp out"),  # each card has keys of its own
        (4, 8, 4, "--dcp 2 is possible"),
        (1, 32, 16, ""),
        (4, 8, 2, ""),
    ],
)
def test_tokens_are_shared_by_cards_with_the_same_keys_only(
    kv_heads: int, tp: int, dcp: int, hint: str
) -> None:
    model = architecture_of(LLAMA | {"num_key_value_heads": kv_heads})
    asking = asked(engine="vllm", tp=tp, dcp=dcp)
    if hint:
        with pytest.raises(DoesNotFit, match=f"--dcp {dcp}: {kv_heads} key") as refused:
            answer(model, asking)
        assert hint in refused.value.hint
    else:
        alone = answer(model, asked(engine="vllm", tp=tp))
        assert answer(model, asking).room.kv_tokens > (dcp - 1) * alone.room.kv_tokens


def test_more_context_than_the_model_knows_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="only 262144"):
        answer(architecture_of(kimi()), asked(context=300_000))


def test_the_rows_of_a_card_add_up_to_the_card() -> None:
    for engine in ("sglang", "vllm"):
        result = answer(architecture_of(kimi()), asked(engine=engine, fraction=0.9))
        rows = {row.what: row.n_bytes for row in result.rows}
        card, weights = rows.pop("the card"), rows["weights"]
        assert sum(n for what, n in rows.items() if what.startswith("  ")) == weights
        assert sum(n for what, n in rows.items() if not what.startswith("  ")) == card, engine


def test_sizes_are_read_with_their_unit_or_not_at_all() -> None:
    assert read_size("96GiB") == 96 * GIB
    assert read_size(" 1.5 TB ") == 1_500_000_000_000
    assert read_size("500G") == read_size("500 gb") == read_size("500000000000", bare=True)
    assert read_card_size("96GB") == read_card_size("96 gb") == read_card_size("96GiB") == 96 * GIB
    assert read_card_size("97887MiB") == 97_887 << 20
    for bad in ("96", "", "-3GiB", "96 apples", "0GiB", "1e9GiB", "9999999TiB", "nanGiB"):
        with pytest.raises(ValueError, match="size"):
            read_size(bad)
        with pytest.raises(ValueError, match="size"):
            read_card_size(bad)


def test_tokens_are_read_as_contexts_are_called() -> None:
    assert [read_tokens(t) for t in ("131072", "128k", "128K", "1M")] == [131072] * 3 + [1 << 20]
    for bad in ("", "k", "0", "-1", "1.5k", "128kB", "17M", "128 tokens"):
        with pytest.raises(ValueError, match="tokens"):
            read_tokens(bad)


@pytest.mark.parametrize(
    ("card_mib", "tp", "want"),
    [
        (32_607, 1, 0.885),  # RTX 5090: pieces of 2,048 tokens, graphs up to 24
        (32_607, 2, 0.881),
        (32_607, 4, 0.869),  # graphs up to 80
        (97_887, 1, 0.863),
        (97_887, 8, 0.848),
        (16_000, 1, 0.767),
        (46_068, 1, 0.851),
    ],
)
def test_sglang_chooses_its_share_by_the_size_of_a_card(
    card_mib: int, tp: int, want: float
) -> None:
    question = asked(card_bytes=card_mib << 20, tp=tp)
    assert sglang_default_fraction(architecture_of(LLAMA), question) == want


# by hand: 512 + 1.5 for each token of a step + 2 for each sequence of a graph + 128 for each card,
# and 1,536 (a latent) or 8 for each of 50 or 58 graphs of prefill steps
@pytest.mark.parametrize(
    ("config", "card_mib", "tp", "want"),
    [
        (LLAMA, 32_607, 1, 0.777),
        (LLAMA, 32_607, 4, 0.758),
        (LLAMA, 97_887, 8, 0.844),
        ("kimi", 97_887, 8, 0.833),
    ],
)
def test_a_later_sglang_keeps_more_for_graphs(
    config: Any, card_mib: int, tp: int, want: float
) -> None:
    text = kimi()["text_config"] | {"architectures": ["DeepseekV3ForCausalLM"]}
    model = architecture_of(text | {"dtype": "bfloat16"} if config == "kimi" else config)
    question = asked(card_bytes=card_mib << 20, tp=tp)
    assert later_sglang_fraction(model, question) == want
    notes = answer(model, question).notes
    assert any(f"0.5.23 chooses {want:.3f}" in note for note in notes)
