"""The feed-forward parts of a model: dense ones and experts, in which layers, and how wide."""

from __future__ import annotations

from pipeline.errors import ModelUnreadable
from pipeline.fit.fields import Table, count, few, names
from pipeline.fit.mixers import layer_count, layer_names
from pipeline.fit.shape import Moe

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


def read_feed_forward(text: Table, bounds: list[str]) -> tuple[int, Moe | None]:
    """How many layers are dense, and the experts of the others."""
    layers = layer_count(text)
    if not few(text, *_EXPERTS):
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
    return kinds.count("mlp"), moe


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
    )
    shared = text.get("n_shared_experts", text.get("num_shared_experts")) or 0
    if not isinstance(shared, int) or shared < 0:
        raise ModelUnreadable(f"n_shared_experts: {shared!r} is not a number of shared experts")
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
    frequency = text.get("moe_layer_freq", 1)
    if isinstance(frequency, list):  # a 0 or 1 for every layer
        return ["moe" if each else "mlp" for each in frequency]
    step = text.get("decoder_sparse_step", 1)
    if frequency != 1 or step != 1:
        raise ModelUnreadable(
            "moe_layer_freq: only models with experts in every layer are supported"
        )
    first, only = text.get("first_k_dense_replace", 0), text.get("mlp_only_layers") or []
    if not isinstance(first, int) or not isinstance(only, list):
        raise ModelUnreadable("first_k_dense_replace: is not a number of layers")
    dense = first + len(only)
    if not 0 <= dense < layers:
        raise ModelUnreadable(f"first_k_dense_replace: {dense} dense layers of {layers}")
    return ["mlp"] * dense + ["moe"] * (layers - dense)
