"""Every kind of tensor of a model: how many, how large, and what tensor parallelism does to it.

Column and row parallel matrices, experts and the vocabulary are divided among the cards. Routers,
norms, the down projections of MLA and the vision tower lie whole on every card (sglang 0.5.8
models/deepseek_v2.py: ReplicatedLinear; vLLM the same).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.core.errors import DoesNotFit
from pipeline.serving.fit import shape
from pipeline.serving.fit.units import MIB, share

# PyTorch's CUDACachingAllocator: blocks of 512 bytes; from 10 MiB on, segments of 2 MiB
_SMALL_ROUND, _LARGE, _LARGE_ROUND = 512, 10 * MIB, 2 * MIB
_VOCABULARY_ROUND = 64  # sglang and vLLM pad the vocabulary to this before they divide it
_EXPERT = "an expert's width"
_SCALAR = shape.Scheme(name="float32", bits=32)
_BYTE = shape.Scheme(name="bytes", bits=8)


@dataclass(frozen=True)
class TensorGroup:
    """One tensor, repeated: in how many layers, with how many weights, of which precision."""

    name: str
    count: int
    weights: int
    scheme: shape.Scheme
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


def _stored(weights: int, scheme: shape.Scheme) -> int:
    packed = share(weights * scheme.bits, 8)
    return packed + (
        round(share(weights, scheme.group) * scheme.group_bytes) if scheme.group else 0
    )


def _allocated(n_bytes: int) -> int:
    # a card's free memory shrinks by segments, not by tensors
    step = _LARGE_ROUND if n_bytes >= _LARGE else _SMALL_ROUND
    return share(n_bytes, step) * step


def tensor_parts(model: shape.Architecture, engine: str = "", tp: int = 1) -> list[TensorGroup]:
    """All tensors of a model, and those that an engine adds when it loads them on so many cards."""
    base = model.precision.base
    rows = share(model.vocabulary, _VOCABULARY_ROUND) * _VOCABULARY_ROUND
    parts = [TensorGroup("embedding", 1, rows * model.hidden, base)]
    if model.lookup:
        parts.append(TensorGroup("embedding, layers", 1, model.lookup, base))
    # tied: the embedding is the output head as well
    if not model.tied:
        parts.append(TensorGroup("output head", 1, rows * model.hidden, model.precision.head))
    # one before attention, one before the feed-forward part, one at the end
    computing = model.dense_layers + (model.moe.layers if model.moe else 0)
    norms = (sum(mixer.layers for mixer in model.mixers) + computing + 1) * model.hidden
    parts.append(TensorGroup("norms", 1, norms, base, divided=False))
    for mixer in model.mixers:
        parts += _mixer(model, mixer)
    if n := model.dense_layers:
        dense, up = model.hidden * model.dense_width, 2 if model.gated else 1
        parts.append(TensorGroup("dense, gate and up", n, up * dense, model.precision.dense))
        parts.append(TensorGroup("dense, down", n, dense, model.precision.dense))
    if model.moe is not None:
        parts += _experts(model, model.moe, engine, tp)
    if model.vision is not None:
        tower = model.vision.parameters(model.hidden)
        parts.append(TensorGroup("vision tower", 1, tower, base, divided=False))
    if model.unexplained_bytes:
        parts.append(TensorGroup("beyond known parts", 1, model.unexplained_bytes, _BYTE))
    return parts


def _mixer(model: shape.Architecture, mixer: shape.Mixer) -> Iterator[TensorGroup]:
    n, attention, hidden = mixer.layers, mixer.attention, model.hidden
    scheme, base = model.precision.attention, model.precision.base
    match attention:
        case shape.Mla() as mla:
            down = hidden * (mla.q_rank + mla.kv_rank + mla.rope)
            yield TensorGroup("attention, down", n, down, scheme, divided=False)
            queries = (mla.q_rank or hidden) * mla.heads * (mla.nope + mla.rope)
            yield TensorGroup("attention, queries", n, queries, scheme)
            up = mla.kv_rank * mla.heads * (mla.nope + mla.value)
            yield TensorGroup("attention, up", n, up, scheme)
            # sglang (w_kc, w_vc) and vLLM (W_UK_T, W_UV) keep both halves again, unquantised
            yield TensorGroup("attention, absorbed", 2 * n, up // 2, base, in_file=False)
            output = mla.heads * mla.value * hidden
            yield TensorGroup("attention, output", n, output, scheme)
            if mla.gate:
                yield TensorGroup("attention, gate", n, output, scheme)
            norms = mla.q_rank + mla.kv_rank
            yield TensorGroup("attention, norms", n, norms, base, divided=False)
        case shape.Gqa() as gqa:
            width = gqa.heads * gqa.head * (2 if gqa.gate else 1)
            width += gqa.kv_heads * (gqa.head + gqa.value)
            yield TensorGroup("attention, qkv", n, hidden * width, scheme)
            yield TensorGroup("attention, output", n, gqa.heads * gqa.value * hidden, scheme)
            if gqa.bias:
                yield TensorGroup("attention, bias", n, width, base)
        case shape.Compressed() as csa:
            wide, down = csa.heads * csa.head, hidden * (csa.q_rank + csa.head)
            yield TensorGroup("attention, down", n, down, scheme, divided=False)
            yield TensorGroup("attention, queries", n, csa.q_rank * wide, scheme)
            output = csa.o_rank * (wide + csa.groups * hidden)
            yield TensorGroup("attention, output", n, output, scheme)
            if csa.ratio:
                # runs of 4 overlap, so that their keys and scores are twice as wide
                per_head = 2 * (2 if csa.ratio == 4 else 1) * (hidden + csa.ratio)
                narrow = per_head * (csa.head + csa.index_head)
                yield TensorGroup("attention, compressor", n, narrow, base, divided=False)
            if csa.index_heads:
                queries = csa.q_rank * csa.index_heads * csa.index_head
                yield TensorGroup("indexer, queries", n, queries, scheme, divided=False)
                scores = hidden * csa.index_heads
                yield TensorGroup("indexer, scores", n, scores, base, divided=False)
        case shape.Linear() as linear:
            yield TensorGroup("linear attention", n, linear.divided, model.precision.linear)
            if linear.whole:
                yield TensorGroup("linear attention, whole", n, linear.whole, base, divided=False)
    if (indexer := mixer.indexer) is not None:
        # its queries come from the compressed ones where there are some; on every card whole
        rank = attention.q_rank if isinstance(attention, shape.Mla) else 0
        queries = (rank or hidden) * indexer.heads * indexer.head
        yield TensorGroup("indexer, queries", n, queries, scheme, divided=False)
        keys = hidden * (indexer.head + indexer.heads) + 2 * indexer.head
        yield TensorGroup("indexer, keys", n, keys, base, divided=False)


def _experts(
    model: shape.Architecture, moe: shape.Moe, engine: str, tp: int
) -> Iterator[TensorGroup]:
    n, up, precision = moe.layers, 2 if model.gated else 1, model.precision
    scheme, weights, loaded = precision.experts, moe.experts * moe.hidden * moe.width, 0
    if scheme.name == "mxfp4":
        # vLLM's Marlin kernels want 256 of the hidden side and 128 of a card's width, which makes
        # gpt-oss-120b 5 GiB larger than its files
        sides = share(moe.hidden, 256) * 256 * share(share(moe.width, tp), 128) * 128
        loaded = moe.experts * sides * tp
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
    if engine == "sglang" and scheme.name == "nvfp4":
        # sglang's NVFP4 loading cannot give these back. create_weights makes the down matrices'
        # scales inside the block that the scratch copy of the gate and up scales has just freed;
        # the other half of that block then takes a scratch copy and after it the next layer's
        # attention. When process_weights_after_loading deletes the scales, the block is half in
        # use, so empty_cache() cannot return it (modelopt_quant.py of 0.5.7 and 0.5.8). Playing
        # the same requests through a model of the allocator gives 73.61 GiB; this sum, 73.60.
        scales = share(weights, scheme.group or 16)
        yield TensorGroup("scales the allocator keeps", n, scales, _BYTE, in_file=False)


def require_divisible(model: shape.Architecture, tp: int) -> None:
    """Stop where no engine could divide the model among that many cards."""
    if undivided := _undivided(model, tp):
        fewer = next((n for n in range(tp - 1, 0, -1) if not _undivided(model, n)), None)
        other = f"--tp {fewer} is possible." if fewer else "no smaller number is possible, either."
        raise DoesNotFit(undivided, f"Engines refuse this number of cards; {other}")


def require_context_parallel(model: shape.Architecture, tp: int, dcp: int) -> None:
    """Stop where vLLM would not divide a request's tokens among that many cards.

    Only cards that have the same keys and values can share them: those of MLA, and of heads that
    are fewer than the cards (vLLM: config/model.py, verify_with_parallel_config).
    """
    heads = model.attention
    if dcp == 1 or not isinstance(heads, shape.Gqa):
        return
    most, group = max(1, tp // heads.kv_heads), heads.heads // heads.kv_heads
    if dcp > most or group % dcp:
        sharing = f"{heads.kv_heads} key and value heads on {tp} cards"
        fewer = [n for n in range(2, most + 1) if not group % n]
        possible = f"--dcp {fewer[-1]} is possible." if fewer else "leave --dcp out."
        raise DoesNotFit(
            f"--dcp {dcp}: {sharing} leave no {dcp} cards with the same ones",
            f"vLLM refuses it; {possible}",
        )


def _undivided(model: shape.Architecture, tp: int) -> str:
    """The first part that cannot be divided among that many cards; empty where all can."""
    widths, precision, moe = list[tuple[str, shape.Scheme, int]](), model.precision, model.moe
    for attention in (mixer.attention for mixer in model.mixers):
        if attention.heads % tp:
            kind = "heads of linear attention" if attention.kind == "linear" else "attention heads"
            return f"{kind}: {attention.heads} cannot be divided among {tp} cards"
        # more cards than such heads: each is on several cards, so the cards must divide by them
        if isinstance(attention, shape.Gqa) and attention.kv_heads % tp and tp % attention.kv_heads:
            return f"cards: {tp} cannot be divided among {attention.kv_heads} key and value heads"
    if isinstance(gqa := model.attention, shape.Gqa):
        widths.append(("its queries", precision.attention, gqa.heads * gqa.head // tp))
        keys = max(1, gqa.kv_heads // tp) * gqa.head
        widths.append(("its keys", precision.attention, keys))
    if model.dense_layers:
        if model.dense_width % tp:
            return f"the dense width: {model.dense_width} cannot be divided among {tp} cards"
        widths.append(("its dense width", precision.dense, model.dense_width // tp))
    if moe is not None:
        if moe.width % tp:
            return f"the experts' width: {moe.width} cannot be divided among {tp} cards"
        widths.append((_EXPERT, precision.experts, moe.width // tp))
        if moe.shared_width:
            shared = moe.shared_width // tp
            widths.append(("its shared experts' width", precision.shared, shared))
    # a card's share of a matrix must not end inside a group or a block of its weights
    for name, scheme, width in widths:
        cut = f"--tp {tp}: {width} of {name} on a card cut its"
        # Runs are along one side only, and of experts alone: other matrices are cut along the other
        # side. A block of fp8 is cut either way (vllm-project/vllm#17569; sglang: the same check).
        if scheme.block and width % scheme.block:
            return f"{cut} blocks of {scheme.block} x {scheme.block}"
        # Experts of mxfp4 are rounded up instead: gpt-oss runs on eight cards (vllm#51590).
        if name != _EXPERT or scheme.block or scheme.name == "mxfp4":
            continue
        if scheme.group and width % scheme.group:
            return f"{cut} groups of {scheme.group}"
    return ""
