"""The products that one card computes for a recipe: its model's matrices after sharding.

Which matrices are divided, and along which side, is as in fit/parts.py. Engines join what has the
same input into one product: queries, keys and values; gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.core.errors import ModelUnreadable, RecipeInvalid
from pipeline.serving.fit.parts import require_divisible
from pipeline.serving.fit.shape import Architecture, Gqa, Mla, Scheme
from pipeline.serving.fit.units import share
from pipeline.serving.products.model import Format, Product, Skipped
from pipeline.serving.recipe.flags import SglangFlags, VllmFlags
from pipeline.serving.recipe.model import Recipe, merged_flags

_BLOCK = 128 * 128
# One token, the batches of decoding, and a piece of a prompt.
_TOKENS = (1, 16, 64, 1024)
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class Sharding:
    """How a recipe divides a model among its cards."""

    tensor: int = 1
    experts: int = 1  # parts that whole experts are spread over


class _Matrix(NamedTuple):
    name: str
    n: int
    k: int
    scheme: Scheme
    is_expert: bool = False


def sharding_of(recipe: Recipe) -> Sharding:
    """From the flags of vLLM or SGLang."""
    flags = merged_flags(recipe)
    if isinstance(flags, VllmFlags):
        tensor = flags.tensor_parallel_size or 1
        # vLLM spreads experts over all ranks of a replica and of its copies
        spread = tensor * (flags.data_parallel_size or 1) if flags.enable_expert_parallel else 1
        return Sharding(tensor, spread)
    if isinstance(flags, SglangFlags):
        return Sharding(flags.tensor_parallel_size or 1, flags.ep_size or 1)
    raise RecipeInvalid(
        f"{recipe.name}: {recipe.engine} has no FP4 or FP8 products of this kind",
        "Products are probed for recipes of vLLM and SGLang.",
    )


def tokens_of(recipe: Recipe) -> list[int]:
    """How many tokens a product has at a time, the recipe's own batch among them."""
    flags = merged_flags(recipe)
    own = flags.given().get("max_num_seqs") or flags.given().get("max_running_requests")
    return sorted({*_TOKENS, *([min(own, _MOST_TOKENS)] if own else [])})


def products_of(model: Architecture, shards: Sharding) -> tuple[list[Product], list[Skipped]]:
    """All kinds of products of a model, and those that have another number format."""
    require_divisible(model, shards.tensor)
    products: list[Product] = []
    others = {m.attention.kind for m in model.mixers} - {model.attention.kind}
    why = "its products are not known"
    skipped = [Skipped(name=f"{kind} attention", why=why) for kind in others]
    for name, n, k, scheme, is_expert in _matrices(model, shards):
        formats: list[Format] = []
        if scheme.name == "nvfp4":
            formats = ["nvfp4"]
        elif scheme.name == "fp8" and scheme.group == _BLOCK:
            formats = ["fp8-block"]
        elif scheme.name == "fp8" and scheme.group == 0:
            # the architecture does not say whether a scale is for a tensor or for each of its rows
            formats = ["fp8-tensor", "fp8-channel"]
        else:
            skipped.append(Skipped(name=name, why=f"their weights are {scheme.name}"))
        experts, visited = 0, 0.0
        if is_expert and model.moe is not None:
            experts = share(model.moe.experts, shards.experts)
            visited = model.moe.active / model.moe.experts
        for each in formats:
            product = Product(name=name, n=n, k=k, format=each, experts=experts, visited=visited)
            products.append(product)
    return products, skipped


def _matrices(model: Architecture, shards: Sharding) -> Iterator[_Matrix]:
    tp, hidden, precision, attention = shards.tensor, model.hidden, model.precision, model.attention
    scheme = precision.attention
    if isinstance(attention, Mla):
        heads, latent = attention.heads // tp, attention.kv_rank + attention.rope
        yield _Matrix("attention, down", attention.q_rank + latent, hidden, scheme)
        queries = heads * (attention.nope + attention.rope)
        yield _Matrix("attention, queries", queries, attention.q_rank or hidden, scheme)
        rows = heads * (attention.nope + attention.value)
        yield _Matrix("attention, up", rows, attention.kv_rank, scheme)
        yield _Matrix("attention, output", hidden, heads * attention.value, scheme)
    elif isinstance(attention, Gqa):
        # fewer heads of keys and values than cards: each card has one
        heads, kv_heads = attention.heads // tp, max(1, attention.kv_heads // tp)
        rows = (heads + 2 * kv_heads) * attention.head
        yield _Matrix("attention, qkv", rows, hidden, scheme)
        yield _Matrix("attention, output", hidden, heads * attention.head, scheme)
    else:
        raise ModelUnreadable(f"{model.family}: the products of its attention are not known")
    if model.dense_layers:
        width = model.dense_width // tp
        yield _Matrix("dense, gate and up", 2 * width, hidden, precision.dense)
        yield _Matrix("dense, down", hidden, width, precision.dense)
    if (moe := model.moe) is not None:
        # experts that are spread stay whole, as far as there are parts of both kinds
        width = moe.width // max(1, tp // shards.experts)
        up = (2 if model.gated else 1) * width
        yield _Matrix("experts, gate and up", up, moe.hidden, precision.experts, is_expert=True)
        yield _Matrix("experts, down", moe.hidden, width, precision.experts, is_expert=True)
        if moe.shared_width:
            width = moe.shared_width // tp
            yield _Matrix("shared experts, gate and up", 2 * width, hidden, precision.shared)
            yield _Matrix("shared experts, down", hidden, width, precision.shared)
    if not model.tied:
        # both engines pad the vocabulary to 64 before they divide it
        rows = share(share(model.vocabulary, 64) * 64, tp)
        yield _Matrix("output head", rows, hidden, precision.head)
