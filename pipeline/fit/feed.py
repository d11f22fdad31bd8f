"""The feed-forward parts of a model: dense ones and experts, in which layers, and how wide."""

from __future__ import annotations

import re
from collections.abc import Collection

from pipeline.errors import ModelUnreadable
from pipeline.fit.fields import Table, count, few, flag, names, numbers, told
from pipeline.fit.mixers import layer_count, layer_names
from pipeline.fit.shape import Moe

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_ACTIVE = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    *("top_k_experts", "experts_per_token"),
)
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_NUMBER_OF_EXPERTS = re.compile(
    r"(n|num|number)_(\w+_)?experts|experts?_(num|count)|\w+_num_experts"
)


def read_feed_forward(text: Table, bounds: list[str]) -> tuple[int, Moe | None]:
    """How many layers are dense, and the experts of the others."""
    layers = layer_count(text)
    if not few(text, *_EXPERTS):
        _require_none(text)
        return _computing(text, layers).count("mlp"), None
    kinds = _computing(text, layers)
    sparse = kinds.count("moe")
    if not sparse or len(kinds) != layers:
        raise ModelUnreadable(f"{sparse} of {len(kinds)} layers have experts, of {layers} in all")
    # some models have no width but that of their experts under this name (MiniMax-M2, gpt-oss)
    width = count(text, "moe_intermediate_size", "intermediate_size")
    moe = Moe(
        experts=count(text, *_EXPERTS),
        active=count(text, *_ACTIVE),
        width=width,
        layers=sparse,
        hidden=few(text, "moe_latent_size", "routed_expert_hidden_size")
        or count(text, "hidden_size"),
        shared_width=_shared_width(text, width),
        bias=_has_bias(text),
    )
    if moe.active > moe.experts:
        raise ModelUnreadable(f"num_experts_per_tok: {moe.active} of only {moe.experts} experts")
    _tell_of_hash_layers(text, bounds)
    # Grok-2 and Gemma 4 have a dense part beside the experts, in every layer
    has_both = flag(text, "residual_moe") or flag(text, "enable_moe_block")
    return layers if has_both else kinds.count("mlp"), moe


def _require_none(text: Table) -> None:
    """Experts under a name that is not known must not be taken for a model without any."""
    for key, value in text.items():
        known = (*_EXPERTS, *_ACTIVE, *_SHARED)
        is_number = type(value) is int and value > 1 and key not in known
        if is_number and _NUMBER_OF_EXPERTS.fullmatch(key):
            raise ModelUnreadable(f"{key}: experts are not known under this name")


def _tell_of_hash_layers(text: Table, bounds: list[str]) -> None:
    if few(text, "num_hash_layers"):
        bounds.append(
            "num_hash_layers: the tables of hashed experts are not counted; they are small."
        )


def _shared_width(text: Table, width: int) -> int:
    named = few(
        text,
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
    )
    shared = next((text[key] for key in _SHARED if key in text), None) or 0
    if not isinstance(shared, int) or shared < 0:
        raise ModelUnreadable(f"n_shared_experts: {told(shared)} is not a number of shared experts")
    # Llama 4 has one always, and no field for it
    if "interleave_moe_layer_step" in text and not shared:
        shared = 1
    return named * max(1, shared) or shared * width


def _has_bias(text: Table) -> bool:
    # gpt-oss: no field says so, its experts are known by their clamp and a bias in attention
    return bool(text.get("swiglu_limit") and text.get("attention_bias"))


def _computing(text: Table, layers: int) -> list[str]:
    """`mlp`, `moe` or nothing, for each layer."""
    listed = layer_names(text)
    if "mlp" in listed or "moe" in listed:
        return [name if name in ("mlp", "moe") else "" for name in listed]
    if not few(text, *_EXPERTS):
        return ["mlp"] * layers
    if kinds := names(text, "mlp_layer_types"):
        return ["mlp" if kind == "dense" else "moe" for kind in kinds]
    return _by_rule(text, layers)


def _by_rule(text: Table, layers: int) -> list[str]:
    if (sparse := _numbered(text, layers)) is not None:
        return ["moe" if i in sparse else "mlp" for i in range(layers)]
    frequency = text.get("moe_layer_freq", text.get("is_moe_layer", 1))
    if isinstance(frequency, list):  # a 0 or 1 for every layer
        return ["moe" if each else "mlp" for each in frequency]
    step = text.get("decoder_sparse_step", 1)
    if frequency != 1 or step != 1:
        raise ModelUnreadable(
            "moe_layer_freq: only models with experts in every layer are supported"
        )
    first = text.get("first_k_dense_replace", text.get("num_dense_layers", 0))
    only = text.get("mlp_only_layers") or []
    if not isinstance(first, int) or not isinstance(only, list):
        raise ModelUnreadable("first_k_dense_replace: is not a number of layers")
    dense = first + len(only)
    if not 0 <= dense < layers:
        raise ModelUnreadable(f"first_k_dense_replace: {dense} dense layers of {layers}")
    return ["mlp"] * dense + ["moe"] * (layers - dense)


def _numbered(text: Table, layers: int) -> Collection[int] | None:
    """The layers with experts, where a config numbers them."""
    if isinstance(listed := text.get("moe_layers_enum"), str):  # Step
        found = [part.strip() for part in listed.split(",")]
        if not all(re.fullmatch(r"\d{1,4}", part) for part in found):
            raise ModelUnreadable("moe_layers_enum: is not a list of numbers")
        return {int(part) for part in found}
    if listed := numbers(text, "moe_layers_enum") or numbers(text, "moe_layers"):
        return set(listed)
    if step := few(text, "interleave_moe_layer_step"):  # Llama 4
        return range(step - 1, layers, step)
    if period := few(text, "expert_layer_period"):  # Jamba
        return range(few(text, "expert_layer_offset"), layers, period)
    if text.get("moe_layer_start_index") is not None:  # ERNIE 4.5
        first, step = few(text, "moe_layer_start_index"), few(text, "moe_layer_interval") or 1
        last = few(text, "moe_layer_end_index") or layers - 1
        return {i for i in range(first, last + 1) if (i + 1) % step == 0}
    return None
