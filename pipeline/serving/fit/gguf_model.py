"""One model from all parts of its GGUF file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import ModelUnreadable
from pipeline.serving.fit.fields import describe
from pipeline.serving.fit.gguf import GgufTensor, read_gguf_header

_LONGEST_NAME = 64  # of an architecture; those of llama.cpp have up to 20 letters
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # llama.cpp: llama_split_path


@dataclass(frozen=True)
class GgufModel:
    """What placing a model needs: its tensors, and the sizes that buffers follow from."""

    tensors: list[GgufTensor]
    layers: int
    hidden: int
    vocabulary: int
    context: int
    kv_values: list[int]  # a token's, in each layer
    is_mla: bool
    experts: int
    active: int
    expert_width: int
    # of an MLA model whose keys and values are spelled out; 0 where its file does not say
    heads: int = 0
    head_values: int = 0  # a head's key and value
    bounds: tuple[str, ...] = ()  # what was not understood, and on which side it is counted

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


def read_gguf(path: Path) -> GgufModel:
    """Reads a model from any of its parts; all of them must exist."""
    heads = [read_gguf_header(part) for part in gguf_parts(path)]
    for number, head in enumerate(heads):
        count, position = head.metadata.get("split.count", 1), head.metadata.get("split.no")
        # a file that was never split may have a count of 0
        if count != len(heads) and (count, len(heads)) != (0, 1):
            raise ModelUnreadable(f"{head.path.name}: is one of {count} parts, not {len(heads)}")
        if len(heads) > 1 and position != number:
            raise ModelUnreadable(f"{head.path.name}: is numbered as part {position}")
    tensors = [tensor for head in heads for tensor in head.tensors]
    want, got = heads[0].metadata.get("split.tensors.count"), len(tensors)
    if len(heads) > 1 and want is not None and want != got:
        raise ModelUnreadable(f"{heads[0].path.name}: {want} tensors announced, {got} listed")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelUnreadable(f"{path.name}: two of its parts list the same tensor")
    return _model(path.name, heads[0].metadata, tensors)


def gguf_parts(path: Path) -> list[Path]:
    """All files of a model that was split, in order; else the file alone."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, number, count = named[1], int(named[2]), int(named[3])
    if not 1 <= number <= count:
        raise ModelUnreadable(f"{path.name}: is part {number} of {count}")
    parts = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelUnreadable(
            f"{path.name}: {len(missing)} of {count} parts are missing, {missing[0]} first",
            "Fetch the whole set with `sm120 weights fetch`.",
        )
    return parts


def _model(name: str, metadata: dict[str, Any], tensors: list[GgufTensor]) -> GgufModel:
    family = metadata.get("general.architecture")
    if not isinstance(family, str) or len(family) > _LONGEST_NAME:
        raise ModelUnreadable(f"{name}: general.architecture: {describe(family)} is not a name")

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{family}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise ModelUnreadable(f"{name}: {family}.{key}: {describe(value)} is not a count")
        return value

    embedding = next((t for t in tensors if t.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelUnreadable(f"{name}: has no token_embd.weight")
    hidden, layers = number("embedding_length"), number("block_count")
    # the vocabulary is read from this tensor, so its shape must be believable
    if embedding.shape[0] != hidden:
        raise ModelUnreadable(f"{name}: embedding_length {hidden}, token_embd {embedding.shape[0]}")
    # a sum over missing layers would promise room that does not exist
    blocks = [m for t in tensors if (m := re.match(r"blk\.(\d{1,6})\.(ssm_)?", t.name))]
    held = {int(m[1]) for m in blocks}
    if len(held) != layers or max(held, default=-1) != layers - 1:
        raise ModelUnreadable(f"{name}: block_count is {layers}, but it holds {len(held)} layers")
    # layers of linear attention keep a state instead of tokens
    states = {int(m[1]) for m in blocks if m[2]}
    bounds = []
    if metadata.get(f"{family}.attention.sliding_window"):
        bounds.append(
            "Some layers have a window; all are counted as keeping all tokens, which is the most"
            " they can need."
        )
    if states:
        bounds.append(
            f"The states of {len(states)} layers of linear attention are not counted: some MiB."
        )
    # Kimi K2 is converted as deepseek2, too; newer models have the same keys under other names
    is_mla, heads, head_values = f"{family}.attention.kv_lora_rank" in metadata, 0, 0
    if is_mla:
        latent = number("attention.kv_lora_rank") + number("rope.dimension_count")
        kv_values, heads = [latent] * layers, number("attention.head_count", 0)
        # newer files have the latent's sizes under the older names
        head_values = sum(
            number(f"attention.{what}_length_mla", number(f"attention.{what}_length", 0))
            for what in ("key", "value")
        )
    else:
        listed = _per_layer(metadata, f"{family}.attention.head_count", layers)
        most = max(listed) if listed else number("attention.head_count")
        if not most or (hidden % most and not number("attention.key_length", 0)):
            raise ModelUnreadable(f"attention.head_count: {most} heads for {hidden}")
        head = hidden // most
        sizes = number("attention.key_length", head) + number("attention.value_length", head)
        kv_heads = _per_layer(metadata, f"{family}.attention.head_count_kv", layers)
        kv_heads = kv_heads or [number("attention.head_count_kv", most)] * layers
        kv_values = [n * sizes for n in kv_heads]
    experts = number("expert_count", 0)
    return GgufModel(
        tensors=tensors,
        layers=layers,
        hidden=hidden,
        vocabulary=embedding.shape[1],
        context=number("context_length"),
        kv_values=[0 if i in states else values for i, values in enumerate(kv_values)],
        is_mla=is_mla,
        experts=experts,
        active=number("expert_used_count") if experts else 0,
        expert_width=number("expert_feed_forward_length") if experts else 0,
        heads=heads,
        head_values=head_values,
        bounds=tuple(bounds),
    )


def _per_layer(metadata: dict[str, Any], key: str, layers: int) -> list[int]:
    """A count for each layer; empty where the file has one for all of them."""
    value = metadata.get(key)
    if not isinstance(value, list):
        return []
    if len(value) != layers or not all(type(n) is int and 0 <= n < 1 << 20 for n in value):
        raise ModelUnreadable(f"{key}: is not a count for each of {layers} layers")
    return value
