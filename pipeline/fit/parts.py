"""Every kind of tensor of a model: how many, how large, and what tensor parallelism does to it.

Column and row parallel matrices, experts and the vocabulary are divided among the cards. Routers,
norms, the down projections of MLA and the vision tower lie whole on every card (sglang 0.5.8
models/deepseek_v2.py: ReplicatedLinear; vLLM the same).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import DoesNotFit
from pipeline.fit.shape import (
    Architecture,
    Compressed,
    Gqa,
    Linear,
    Mixer,
    Mla,
    Moe,
    Scheme,
)
from pipeline.fit.units import MIB, share

# PyTorch's CUDACachingAllocator: blocks of 512 bytes; from 10 MiB on, segments of 2 MiB
_SMALL_ROUND, _LARGE, _LARGE_ROUND = 512, 10 * MIB, 2 * MIB
_VOCABULARY_ROUND = 64  # sglang and vLLM pad the vocabulary to this before they divide it
_EXPERT = "an expert's width"
_SCALAR = Scheme(name="float32", bits=32)
_BYTE = Scheme(name="bytes", bits=8)


@dataclass(frozen=True)
class TensorGroup:
    """One tensor, repeated: in how many layers, with how many weights, of which precision."""

    name: str
    count: int
    weights: int
    scheme: Scheme
    divided: bool = True
    in_file: bool = True  # false: made by the engine at load time
    loaded: int = 0  # weights on all cards together, where an engine rounds their sides up

    def file_bytes(self) -> int:
        """In the checkpoint."""
        return self.count * _stored(self.weights, self.scheme) if self.in_file else 0

    def card_bytes(self, tp: int) -> int:
        """On one card, as PyTorch allocates it: weights and scales are tensors of their own."""
        whole = self.loaded or self.weights
        weights = share(whole, tp) if self.divided else whole
        packed = share(weights * self.scheme.bits, 8)
        scales = _stored(weights, self.scheme) - packed
        return self.count * (_allocated(packed) + _allocated(scales))


def _stored(weights: int, scheme: Scheme) -> int:
    packed = share(weights * scheme.bits, 8)
    return packed + (
        round(share(weights, scheme.group) * scheme.group_bytes) if scheme.group else 0
    )


def _allocated(n_bytes: int) -> int:
    # a card's free memory shrinks by segments, not by tensors
    step = _LARGE_ROUND if n_bytes >= _LARGE else _SMALL_ROUND
    return share(n_bytes, step) * step


def parts_of(model: Architecture, engine: str = "", tp: int = 1) -> list[TensorGroup]:
    """All tensors of a model, and those that an engine adds when it loads them on so many cards."""
    parts = [*_ends(model)]
    for mixer in model.mixers:
        parts += _mixer(model, mixer)
    parts += _dense(model)
    if model.moe is not None:
        parts += _experts(model, model.moe, engine, tp)
    if model.vision is not None:
        weights = model.vision.parameters(model.hidden)
        parts.append(TensorGroup("vision tower", 1, weights, model.precision.base, divided=False))
    if model.unexplained_bytes:
        parts.append(TensorGroup("beyond known parts", 1, model.unexplained_bytes, _BYTE))
    return parts


def _ends(model: Architecture) -> Iterator[TensorGroup]:
    rows = share(model.vocabulary, _VOCABULARY_ROUND) * _VOCABULARY_ROUND
    yield TensorGroup("embedding", 1, rows * model.hidden, model.precision.base)
    if model.lookup:
        yield TensorGroup("embedding, layers", 1, model.lookup, model.precision.base)
    # tied: the embedding is the output head as well
    if not model.tied:
        yield TensorGroup("output head", 1, rows * model.hidden, model.precision.head)
    # one before attention, one before the feed-forward part, one at the end
    mixing = sum(mixer.layers for mixer in model.mixers)
    computing = model.dense_layers + (model.moe.layers if model.moe else 0)
    norms = (mixing + computing + 1) * model.hidden
    yield TensorGroup("norms", 1, norms, model.precision.base, divided=False)


def _mixer(model: Architecture, mixer: Mixer) -> Iterator[TensorGroup]:
    match mixer.attention:
        case Mla() as mla:
            yield from _mla(model, mixer.layers, mla)
        case Gqa() as gqa:
            yield from _gqa(model, mixer.layers, gqa)
        case Compressed() as compressed:
            yield from _compressed(model, mixer.layers, compressed)
        case Linear() as linear:
            yield from _linear(model, mixer.layers, linear)
    if mixer.indexer is not None:
        yield from _indexer(model, mixer)


def _mla(model: Architecture, n: int, mla: Mla) -> Iterator[TensorGroup]:
    scheme = model.precision.attention
    latent = mla.kv_rank + mla.rope
    queries = mla.heads * (mla.nope + mla.rope)
    down = model.hidden * (mla.q_rank + latent)
    yield TensorGroup("attention, down", n, down, scheme, divided=False)
    yield TensorGroup("attention, queries", n, (mla.q_rank or model.hidden) * queries, scheme)
    up = mla.kv_rank * mla.heads * (mla.nope + mla.value)
    yield TensorGroup("attention, up", n, up, scheme)
    # sglang (w_kc, w_vc) and vLLM (W_UK_T, W_UV) keep both halves again, unquantised
    yield TensorGroup("attention, absorbed", 2 * n, up // 2, model.precision.base, in_file=False)
    output = mla.heads * mla.value * model.hidden
    yield TensorGroup("attention, output", n, output, scheme)
    if mla.gate:
        yield TensorGroup("attention, gate", n, output, scheme)
    base = model.precision.base
    yield TensorGroup("attention, norms", n, mla.q_rank + mla.kv_rank, base, divided=False)


def _indexer(model: Architecture, mixer: Mixer) -> Iterator[TensorGroup]:
    indexer, mla = mixer.indexer, mixer.attention
    assert indexer is not None
    # its queries come from the compressed ones where there are some; on every card whole
    source = mla.q_rank if isinstance(mla, Mla) and mla.q_rank else model.hidden
    queries = source * indexer.heads * indexer.head
    scheme, base = model.precision.attention, model.precision.base
    yield TensorGroup("indexer, queries", mixer.layers, queries, scheme, divided=False)
    keys = model.hidden * (indexer.head + indexer.heads) + 2 * indexer.head
    yield TensorGroup("indexer, keys", mixer.layers, keys, base, divided=False)


def _compressed(model: Architecture, n: int, csa: Compressed) -> Iterator[TensorGroup]:
    scheme, base = model.precision.attention, model.precision.base
    wide = csa.heads * csa.head
    down = model.hidden * (csa.q_rank + csa.head)
    yield TensorGroup("attention, down", n, down, scheme, divided=False)
    yield TensorGroup("attention, queries", n, csa.q_rank * wide, scheme)
    output = csa.o_rank * (wide + csa.groups * model.hidden)
    yield TensorGroup("attention, output", n, output, scheme)
    if csa.ratio:
        # runs of 4 overlap, so that their keys and scores are twice as wide
        overlap = 2 if csa.ratio == 4 else 1
        per_head = 2 * overlap * (model.hidden + csa.ratio)
        narrow = per_head * (csa.head + csa.index_head)
        yield TensorGroup("attention, compressor", n, narrow, base, divided=False)
    if csa.index_heads:
        queries = csa.q_rank * csa.index_heads * csa.index_head
        yield TensorGroup("indexer, queries", n, queries, scheme, divided=False)
        scores = model.hidden * csa.index_heads
        yield TensorGroup("indexer, scores", n, scores, base, divided=False)


def _linear(model: Architecture, n: int, linear: Linear) -> Iterator[TensorGroup]:
    yield TensorGroup("linear attention", n, linear.divided, model.precision.linear)
    if linear.whole:
        base = model.precision.base
        yield TensorGroup("linear attention, whole", n, linear.whole, base, divided=False)


def _gqa(model: Architecture, n: int, gqa: Gqa) -> Iterator[TensorGroup]:
    scheme, queries = model.precision.attention, gqa.heads * gqa.head
    width = queries * (2 if gqa.gate else 1) + gqa.kv_heads * (gqa.head + gqa.value)
    yield TensorGroup("attention, qkv", n, model.hidden * width, scheme)
    yield TensorGroup("attention, output", n, gqa.heads * gqa.value * model.hidden, scheme)
    if gqa.bias:
        yield TensorGroup("attention, bias", n, width, model.precision.base)


def _dense(model: Architecture) -> Iterator[TensorGroup]:
    if model.dense_layers:
        weights, n = model.hidden * model.dense_width, model.dense_layers
        scheme, up = model.precision.dense, 2 if model.gated else 1
        yield TensorGroup("dense, gate and up", n, up * weights, scheme)
        yield TensorGroup("dense, down", n, weights, scheme)


def _experts(model: Architecture, moe: Moe, engine: str, tp: int) -> Iterator[TensorGroup]:
    n, one, up = moe.layers, moe.hidden * moe.width, 2 if model.gated else 1
    precision = model.precision
    scheme, loaded = precision.experts, moe.experts * _rounded(moe, precision.experts, tp)
    weights = moe.experts * one
    yield TensorGroup("experts, gate and up", n, up * weights, scheme, loaded=up * loaded)
    yield TensorGroup("experts, down", n, weights, scheme, loaded=loaded)
    if moe.bias:
        biases = moe.experts * (up * moe.width + moe.hidden)
        yield TensorGroup("experts, bias", n, biases, precision.base)
    if moe.hidden != model.hidden:
        latent = 2 * model.hidden * moe.hidden
        yield TensorGroup("experts, latent", n, latent, precision.base, divided=False)
    yield TensorGroup("router", n, moe.experts * model.hidden, precision.base, divided=False)
    yield TensorGroup("router, bias", n, moe.experts, _SCALAR, divided=False)
    if moe.shared_width:
        shared = model.hidden * moe.shared_width
        yield TensorGroup("shared experts, gate and up", n, up * shared, precision.shared)
        yield TensorGroup("shared experts, down", n, shared, precision.shared)
    if engine == "sglang" and precision.experts.name == "nvfp4":
        yield _scale_left_behind(precision.experts, n, moe.experts * one)


def _rounded(moe: Moe, scheme: Scheme, tp: int) -> int:
    """One matrix of an expert with its sides rounded up; 0 where engines leave them.

    vLLM's Marlin kernels for MXFP4 want 256 of the hidden side and 128 of a card's width, which
    makes gpt-oss-120b 5 GiB larger than its files.
    """
    if scheme.name != "mxfp4":
        return 0
    return share(moe.hidden, 256) * 256 * share(share(moe.width, tp), 128) * 128 * tp


def _scale_left_behind(scheme: Scheme, layers: int, weights: int) -> TensorGroup:
    """What sglang's NVFP4 loading cannot give back.

    create_weights makes the down matrices' scales inside the block that the scratch copy of the
    gate and up scales has just left; the other half of that block then takes a scratch copy and
    after it the next layer's attention. When process_weights_after_loading deletes the scales, the
    block is half in use, so empty_cache() cannot return it (modelopt_quant.py of 0.5.7 and 0.5.8).
    Playing the same requests through a model of the allocator gives 73.61 GiB; this sum, 73.60.
    """
    scales = share(weights, scheme.group or 16)
    fp8 = Scheme(name="fp8", bits=8)
    return TensorGroup("scales the allocator keeps", layers, scales, fp8, in_file=False)


def require_divisible(model: Architecture, tp: int) -> None:
    """Stop where no engine could divide the model among that many cards."""
    if undivided := _undivided(model, tp):
        fewer = next((n for n in range(tp - 1, 0, -1) if not _undivided(model, n)), None)
        other = f"--tp {fewer} is possible." if fewer else "no smaller number is possible, either."
        raise DoesNotFit(undivided, f"Engines refuse this number of cards; {other}")


def require_context_parallel(model: Architecture, tp: int, dcp: int) -> None:
    """Stop where vLLM would not divide a request's tokens among that many cards.

    Only cards that have the same keys and values can share them: those of MLA, and of heads that
    are fewer than the cards (vLLM: config/model.py, verify_with_parallel_config).
    """
    heads = model.attention
    if dcp == 1 or not isinstance(heads, Gqa):
        return
    most = max(1, tp // heads.kv_heads)
    if dcp > most or heads.heads // heads.kv_heads % dcp:
        kept = f"{heads.kv_heads} key and value heads on {tp} cards"
        fewer = [n for n in range(2, most + 1) if not heads.heads // heads.kv_heads % n]
        possible = f"--dcp {fewer[-1]} is possible." if fewer else "leave --dcp out."
        raise DoesNotFit(
            f"--dcp {dcp}: {kept} leave no {dcp} cards with the same ones",
            f"vLLM refuses it; {possible}",
        )


def _undivided(model: Architecture, tp: int) -> str:
    """The first part that cannot be divided among that many cards; empty where all can."""
    for what, whole, parts, by in _divisions(model, tp):
        if whole % parts:
            return f"{what}: {whole} cannot be divided among {parts} {by}"
    cut = _cut_group(model, tp)
    return f"--tp {tp}: {cut}" if cut else ""


def _divisions(model: Architecture, tp: int) -> Iterator[tuple[str, int, int, str]]:
    for mixer in model.mixers:
        attention = mixer.attention
        what = "heads of linear attention" if isinstance(attention, Linear) else "attention heads"
        yield what, attention.heads, tp, "cards"
        # more cards than such heads: each is on several cards, so the cards must divide by them
        if isinstance(attention, Gqa) and attention.kv_heads % tp:
            yield "cards", tp, attention.kv_heads, "key and value heads"
    if model.dense_layers:
        yield "the dense width", model.dense_width, tp, "cards"
    if model.moe is not None:
        yield "the experts' width", model.moe.width, tp, "cards"


def _cut_group(model: Architecture, tp: int) -> str:
    """The first matrix whose share on a card ends inside a group or a block of its weights."""
    for name, scheme, width in _widths(model, tp):
        # Runs are along one side only, and of experts alone: other matrices are cut along the other
        # side. A block of fp8 is cut either way (vllm-project/vllm#17569; sglang: the same check).
        if scheme.block and width % scheme.block:
            return f"{width} of {name} on a card cut its blocks of {scheme.block} x {scheme.block}"
        # Experts of mxfp4 are rounded up instead: gpt-oss runs on eight cards (vllm#51590).
        is_cut = name == _EXPERT and not scheme.block and scheme.name != "mxfp4"
        run = scheme.group if is_cut else 0
        if run and width % run:
            return f"{width} of {name} on a card cut its groups of {run}"
    return ""


def _widths(model: Architecture, tp: int) -> Iterator[tuple[str, Scheme, int]]:
    attention, precision = model.attention, model.precision
    if isinstance(attention, Gqa):
        yield "its queries", precision.attention, attention.heads * attention.head // tp
        heads = max(1, attention.kv_heads // tp)
        yield "its keys", precision.attention, heads * attention.head
    if model.dense_layers:
        yield "its dense width", precision.dense, model.dense_width // tp
    if model.moe is not None:
        yield _EXPERT, precision.experts, model.moe.width // tp
        if model.moe.shared_width:
            yield "its shared experts' width", precision.shared, model.moe.shared_width // tp
