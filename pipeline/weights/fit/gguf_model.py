"""One model from all parts of its GGUF file, or from a shipped recipe."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ModelUnreadable
from pipeline.weights.fit.facts import Recipe
from pipeline.weights.fit.ggml import BY_NAME
from pipeline.weights.fit.gguf import Head, Tensor, read_head
from pipeline.weights.fit.shape import Architecture, Mla

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_KNOWN = ("deepseek2", "llama", "qwen2", "qwen3", "qwen3moe")


@dataclass(frozen=True)
class GgufModel:
    """What placing a model needs: its tensors, and the sizes that buffers follow from."""

    tensors: list[Tensor]
    layers: int
    hidden: int
    vocabulary: int
    context: int
    kv_values: int  # a token's in one layer
    is_mla: bool
    experts: int
    active: int
    expert_width: int

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


def read_gguf(path: Path) -> GgufModel:
    """A model from any of its parts; all of them must be there."""
    heads = [read_head(part) for part in parts_of(path)]
    _require_whole(heads)
    tensors = [tensor for head in heads for tensor in head.tensors]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelUnreadable(f"{path.name}: two of its parts list the same tensor")
    return _model(path.name, heads[0].metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """All files of a model that was split, in order; else the file alone."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    if not 1 <= int(found[2]) <= count:
        raise ModelUnreadable(f"{path.name}: is part {int(found[2])} of {count}")
    parts = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelUnreadable(
            f"{path.name}: {len(missing)} of {count} parts are missing, {missing[0]} first",
            "Fetch the whole set with `sm120 weights fetch`.",
        )
    return parts


def _require_whole(heads: list[Head]) -> None:
    for number, head in enumerate(heads):
        count = head.metadata.get("split.count", 1)
        if (count if len(heads) > 1 else max(1, count)) != len(heads):
            raise ModelUnreadable(f"{head.path.name}: is one of {count} parts, not {len(heads)}")
        if len(heads) > 1 and head.metadata.get("split.no") != number:
            raise ModelUnreadable(f"{head.path.name}: says it is part {head.metadata['split.no']}")
    want = heads[0].metadata.get("split.tensors.count")
    got = sum(len(head.tensors) for head in heads)
    if len(heads) > 1 and want is not None and want != got:
        raise ModelUnreadable(f"{heads[0].path.name}: {want} tensors announced, {got} found")


def _model(name: str, metadata: dict[str, Any], tensors: list[Tensor]) -> GgufModel:
    family = metadata.get("general.architecture")
    if family not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise ModelUnreadable(
            f"{name}: the architecture {family!r} is not known to this tool", f"It knows {known}."
        )

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{family}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise ModelUnreadable(f"{name}: {family}.{key}: {value!r} is no count")
        return value

    embedding = next((t for t in tensors if t.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelUnreadable(f"{name}: has no token_embd.weight")
    hidden, layers = number("embedding_length"), number("block_count")
    if embedding.shape[0] != hidden:
        raise ModelUnreadable(f"{name}: embedding_length {hidden}, token_embd {embedding.shape[0]}")
    _require_layers(name, layers, tensors)
    is_mla = family == "deepseek2"
    experts = number("expert_count", 0)
    return GgufModel(
        tensors=tensors,
        layers=layers,
        hidden=hidden,
        vocabulary=embedding.shape[1],
        context=number("context_length"),
        kv_values=_latent(number) if is_mla else _heads(number, hidden),
        is_mla=is_mla,
        experts=experts,
        active=number("expert_used_count") if experts else 0,
        expert_width=number("expert_feed_forward_length") if experts else 0,
    )


def _latent(number: Any) -> int:
    return int(number("attention.kv_lora_rank") + number("rope.dimension_count"))


def _heads(number: Any, hidden: int) -> int:
    heads = number("attention.head_count")
    if not heads or (hidden % heads and not number("attention.key_length", 0)):
        raise ModelUnreadable(f"attention.head_count: {heads} heads for {hidden}")
    head = hidden // heads
    sizes = number("attention.key_length", head) + number("attention.value_length", head)
    return int(number("attention.head_count_kv", heads) * sizes)


def _require_layers(name: str, layers: int, tensors: list[Tensor]) -> None:
    found = {int(m[1]) for t in tensors if (m := re.match(r"blk\.(\d{1,6})\.", t.name))}
    if len(found) != layers or max(found, default=-1) != layers - 1:
        raise ModelUnreadable(f"{name}: block_count is {layers}, but it holds {len(found)} layers")


def from_recipe(model: Architecture, recipe: Recipe) -> GgufModel:
    """The tensors that a published recipe gives for a DeepSeek-like model."""
    if not isinstance(model.attention, Mla) or model.moe is None:
        raise ModelUnreadable(f"{recipe.repository}: recipes are known for MLA models with experts")
    tensors = [
        Tensor(name, shape, BY_NAME[kind], BY_NAME[kind].size(math.prod(shape)))
        for name, shape in _deepseek2(model, model.attention)
        if (kind := next(r.type for r in recipe.types if re.search(r.names, name)))
    ]
    return GgufModel(
        tensors=tensors,
        layers=model.layers,
        hidden=model.hidden,
        vocabulary=model.vocabulary,
        context=model.context,
        kv_values=model.attention.kv_rank + model.attention.rope,
        is_mla=True,
        experts=model.moe.experts,
        active=model.moe.active,
        expert_width=model.moe.width,
    )


def _deepseek2(model: Architecture, mla: Mla) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes as the converter of llama.cpp and ik_llama.cpp writes them."""
    h = model.hidden
    listed: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (h, model.vocabulary)),
        ("output_norm.weight", (h,)),
        ("output.weight", (h, model.vocabulary)),
    ]
    for i in range(model.layers):
        blk = f"blk.{i}."
        listed += [
            (f"{blk}attn_norm.weight", (h,)),
            (f"{blk}attn_q_a.weight", (h, mla.q_rank)),
            (f"{blk}attn_q_a_norm.weight", (mla.q_rank,)),
            (f"{blk}attn_q_b.weight", (mla.q_rank, mla.heads * (mla.nope + mla.rope))),
            (f"{blk}attn_kv_a_mqa.weight", (h, mla.kv_rank + mla.rope)),
            (f"{blk}attn_kv_a_norm.weight", (mla.kv_rank,)),
            (f"{blk}attn_k_b.weight", (mla.nope, mla.kv_rank, mla.heads)),
            (f"{blk}attn_v_b.weight", (mla.kv_rank, mla.value, mla.heads)),
            (f"{blk}attn_output.weight", (mla.heads * mla.value, h)),
            (f"{blk}ffn_norm.weight", (h,)),
            *_feed_forward(model, i, blk),
        ]
    return listed


def _feed_forward(model: Architecture, layer: int, blk: str) -> list[tuple[str, tuple[int, ...]]]:
    h, moe = model.hidden, model.moe
    if moe is None or layer < model.dense_layers:
        return [
            (f"{blk}ffn_gate.weight", (h, model.dense_width)),
            (f"{blk}ffn_up.weight", (h, model.dense_width)),
            (f"{blk}ffn_down.weight", (model.dense_width, h)),
        ]
    w, shared = moe.width, moe.width * moe.shared
    return [
        (f"{blk}ffn_gate_inp.weight", (h, moe.experts)),
        (f"{blk}exp_probs_b.bias", (moe.experts,)),
        (f"{blk}ffn_gate_exps.weight", (h, w, moe.experts)),
        (f"{blk}ffn_up_exps.weight", (h, w, moe.experts)),
        (f"{blk}ffn_down_exps.weight", (w, h, moe.experts)),
        (f"{blk}ffn_gate_shexp.weight", (h, shared)),
        (f"{blk}ffn_up_shexp.weight", (h, shared)),
        (f"{blk}ffn_down_shexp.weight", (shared, h)),
    ]
