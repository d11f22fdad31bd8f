"""The products that one card computes for a recipe: its model's matrices after sharding.

Which matrices are divided, and along which side, is as in fit/parts.py. Engines join what has the
same input into one product: queries, keys and values; gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import ModelUnreadable, RecipeInvalid
from pipeline.fit.parts import require_divisible
from pipeline.fit.shape import Architecture, Gqa, Mla, Scheme
from pipeline.fit.units import share
from pipeline.products.model import Format, Product, Skipped
from pipeline.recipe.flags import SglangFlags, VllmFlags
from pipeline.recipe.model import Recipe, merged_flags

_BLOCK = 128 * 128
# One token, the batches of decoding, and a piece of a prompt.
_TOKENS = (1, 16, 64, 1024)
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class Sharding:
    """How a recipe divides a model among its cards."""

    tensor: int = 1
    experts: int = 1  # parts that whole experts are spread over


@dataclass(frozen=True)
class _Matrix:
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
    skipped: list[Skipped] = []
    others = {m.attention.kind for m in model.mixers} - {model.attention.kind}
    skipped += [
        Skipped(name=f"{kind} attention", why="its products are not known") for kind in others
    ]
    for matrix in _matrices(model, shards):
        formats = _formats(matrix.scheme)
        products += [_product(model, shards, matrix, each) for each in formats]
        if not formats:
            skipped.append(Skipped(name=matrix.name, why=f"their weights are {matrix.scheme.name}"))
    return products, skipped


def _formats(scheme: Scheme) -> list[Format]:
    if scheme.name == "nvfp4":
        return ["nvfp4"]
    if scheme.name != "fp8":
        return []
    if scheme.group == _BLOCK:
        return ["fp8-block"]
    # the architecture does not keep whether a scale is for a tensor or for each of its rows
    return ["fp8-tensor", "fp8-channel"] if scheme.group == 0 else []


def _product(model: Architecture, shards: Sharding, matrix: _Matrix, format_: Format) -> Product:
    plain = Product(name=matrix.name, n=matrix.n, k=matrix.k, format=format_)
    if not matrix.is_expert or model.moe is None:
        return plain
    experts = share(model.moe.experts, shards.experts)
    visited = model.moe.active / model.moe.experts
    return plain.model_copy(update={"experts": experts, "visited": visited})


def _matrices(model: Architecture, shards: Sharding) -> Iterator[_Matrix]:
    tp, hidden = shards.tensor, model.hidden
    if isinstance(model.attention, Mla):
        yield from _mla(model, model.attention, tp)
    elif isinstance(model.attention, Gqa):
        yield from _gqa(model, model.attention, tp)
    else:
        raise ModelUnreadable(f"{model.family}: the products of its attention are not known")
    if model.dense_layers:
        width = model.dense_width // tp
        yield _Matrix("dense, gate and up", 2 * width, hidden, model.precision.dense)
        yield _Matrix("dense, down", hidden, width, model.precision.dense)
    yield from _experts(model, shards)
    if not model.tied:
        # both engines pad the vocabulary to 64 before they divide it
        rows = share(share(model.vocabulary, 64) * 64, tp)
        yield _Matrix("output head", rows, hidden, model.precision.head)


def _mla(model: Architecture, mla: Mla, tp: int) -> Iterator[_Matrix]:
    scheme, heads = model.precision.attention, mla.heads // tp
    latent = mla.kv_rank + mla.rope
    yield _Matrix("attention, down", mla.q_rank + latent, model.hidden, scheme)
    queries = heads * (mla.nope + mla.rope)
    yield _Matrix("attention, queries", queries, mla.q_rank or model.hidden, scheme)
    yield _Matrix("attention, up", heads * (mla.nope + mla.value), mla.kv_rank, scheme)
    yield _Matrix("attention, output", model.hidden, heads * mla.value, scheme)


def _gqa(model: Architecture, gqa: Gqa, tp: int) -> Iterator[_Matrix]:
    scheme, heads = model.precision.attention, gqa.heads // tp
    # fewer such heads than cards: each card has one
    kv_heads = max(1, gqa.kv_heads // tp)
    yield _Matrix("attention, qkv", (heads + 2 * kv_heads) * gqa.head, model.hidden, scheme)
    yield _Matrix("attention, output", model.hidden, heads * gqa.head, scheme)


def _experts(model: Architecture, shards: Sharding) -> Iterator[_Matrix]:
    moe, hidden, precision = model.moe, model.hidden, model.precision
    if moe is None:
        return
    # experts that are spread stay whole, as far as there are parts of both kinds
    width = moe.width // max(1, shards.tensor // shards.experts)
    up = 2 if model.gated else 1
    yield _Matrix("experts, gate and up", up * width, moe.hidden, precision.experts, is_expert=True)
    yield _Matrix("experts, down", moe.hidden, width, precision.experts, is_expert=True)
    if moe.shared_width:
        wide = moe.shared_width // shards.tensor
        yield _Matrix("shared experts, gate and up", 2 * wide, hidden, precision.shared)
        yield _Matrix("shared experts, down", hidden, wide, precision.shared)
