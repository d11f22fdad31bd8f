"""A config.json as an architecture. What is not known is refused, not guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import ModelUnreadable
from pipeline.files import read_at_most
from pipeline.fit.quant import read_precision
from pipeline.fit.shape import Architecture, Gqa, Mla, Moe, Vision

MOST_BYTES = 16 << 20  # of a config.json; real ones have some kilobytes
_MLA = {"DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"}
_GQA = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
_VISION = {"KimiK25ForConditionalGeneration"}
_MOST = 1 << 24  # of any count in it, so that no sum here becomes absurd


def read_config(path: Path) -> Architecture:
    """The architecture that a config.json describes, and hf_quant_config.json beside it."""
    config = _read_json(path)
    beside = path.with_name("hf_quant_config.json")  # NVIDIA's modelopt may put it there only
    if "quantization_config" not in config and beside.is_file():
        quantization = _read_json(beside).get("quantization")
        if not isinstance(quantization, dict):
            raise ModelUnreadable(f"{beside}: quantization: is missing")
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    try:
        return architecture_of(config)
    except ModelUnreadable as error:
        raise ModelUnreadable(f"{path}: {error}", error.hint) from error


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """A parsed config.json as an architecture."""
    family = _family(config)
    # models with a vision tower keep the language model's numbers in text_config
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelUnreadable("text_config: is not a JSON object")
    _require_agreement(config, text)
    try:
        return Architecture(
            family=family,
            layers=_count(text, "num_hidden_layers"),
            hidden=_count(text, "hidden_size"),
            vocabulary=_count(text, "vocab_size"),
            context=_count(text, "max_position_embeddings"),
            dense_width=_count(text, "intermediate_size"),
            tied=_flag(text, "tie_word_embeddings"),
            predictors=text.get("num_nextn_predict_layers") or 0,
            attention=_mla(text) if family in _MLA else _gqa(text),
            moe=_moe(text, family),
            vision=_vision(config) if family in _VISION else None,
            precision=read_precision(config, text),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ModelUnreadable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelUnreadable("architectures: must name exactly one model class")
    if names[0] not in _MLA | _GQA:
        known = ", ".join(sorted(_MLA | _GQA))
        raise ModelUnreadable(
            f"architectures: {names[0]!r} is not supported", f"Supported: {known}."
        )
    return str(names[0])


def _require_agreement(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    # engines differ in which of the two they read, so a contradiction has no right answer
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"):
        if key in config and key in text and config[key] != text[key]:
            raise ModelUnreadable(
                f"{key}: is {config[key]} at the top and {text[key]} in text_config"
            )


def _mla(text: Mapping[str, Any]) -> Mla:
    return Mla(
        heads=_count(text, "num_attention_heads"),
        q_rank=0 if text.get("q_lora_rank") is None else _count(text, "q_lora_rank"),
        kv_rank=_count(text, "kv_lora_rank"),
        rope=_count(text, "qk_rope_head_dim"),
        nope=_count(text, "qk_nope_head_dim"),
        value=_count(text, "v_head_dim"),
    )


def _gqa(text: Mapping[str, Any]) -> Gqa:
    heads, hidden = _count(text, "num_attention_heads"), _count(text, "hidden_size")
    kv_heads = _count(text, "num_key_value_heads") if "num_key_value_heads" in text else heads
    if heads % kv_heads:
        raise ModelUnreadable(f"num_key_value_heads: {kv_heads} does not divide {heads} heads")
    # some layers would then keep all tokens and others a window of them
    if text.get("use_sliding_window"):
        raise ModelUnreadable("use_sliding_window: a cache of two kinds is not supported")
    if text.get("head_dim") is None and hidden % heads:
        raise ModelUnreadable(f"head_dim: is missing, and {heads} heads do not divide {hidden}")
    head = _count(text, "head_dim") if text.get("head_dim") is not None else hidden // heads
    return Gqa(heads=heads, kv_heads=kv_heads, head=head, bias=_flag(text, "attention_bias"))


def _moe(text: Mapping[str, Any], family: str) -> Moe | None:
    # Qwen and DeepSeek name the same number differently
    key = "num_experts" if family == "Qwen3MoeForCausalLM" else "n_routed_experts"
    if family in _GQA and family != "Qwen3MoeForCausalLM":
        return None
    layers = _count(text, "num_hidden_layers")
    moe = Moe(
        experts=_count(text, key),
        active=_count(text, "num_experts_per_tok"),
        shared=text.get("n_shared_experts") or 0,
        width=_count(text, "moe_intermediate_size"),
        layers=layers - _dense_layers(text, layers),
    )
    if moe.active > moe.experts:
        raise ModelUnreadable(f"num_experts_per_tok: {moe.active} of only {moe.experts} experts")
    return moe


def _dense_layers(text: Mapping[str, Any], layers: int) -> int:
    if text.get("moe_layer_freq", 1) != 1 or text.get("decoder_sparse_step", 1) != 1:
        raise ModelUnreadable(
            "moe_layer_freq: only models with experts in every layer are supported"
        )
    first, only = text.get("first_k_dense_replace", 0), text.get("mlp_only_layers") or []
    if not isinstance(first, int) or not isinstance(only, list):
        raise ModelUnreadable("first_k_dense_replace: is not a number of layers")
    dense = first + len(only)
    if not 0 <= dense < layers:
        raise ModelUnreadable(f"first_k_dense_replace: {dense} dense layers of {layers}")
    return dense


def _vision(config: Mapping[str, Any]) -> Vision:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelUnreadable("vision_config: is missing")
    # patches that become one token: the projector is as wide as all of them together
    merge = vision.get("merge_kernel_size")
    if not isinstance(merge, list) or len(merge) != 2:
        raise ModelUnreadable("vision_config: merge_kernel_size: is not a pair")
    height, width = _count(vision, "init_pos_emb_height"), _count(vision, "init_pos_emb_width")
    return Vision(
        layers=_count(vision, "vt_num_hidden_layers"),
        hidden=_count(vision, "vt_hidden_size"),
        width=_count(vision, "vt_intermediate_size"),
        patch=_count(vision, "patch_size"),
        positions=height * width,
        merge=merge[0] * merge[1],
    )


def _count(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key)
    if value is None:
        raise ModelUnreadable(f"{key}: is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
        raise ModelUnreadable(f"{key}: {value!r} is not a count")
    return value


def _flag(table: Mapping[str, Any], key: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise ModelUnreadable(f"{key}: {value!r} is neither true nor false")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = read_at_most(path, MOST_BYTES)
        if data is None:
            raise ValueError("is larger than 16 MiB")
        # as engines read it, not strictly: published configs do hold Infinity and 10**30
        value = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnreadable(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnreadable(f"{path}: is not a JSON object")
    return value
