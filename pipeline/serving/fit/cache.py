"""The memory that tokens and requests take on one card.

Most layers keep something of every token. Layers with a window keep the last tokens of a request,
and linear attention keeps a state of one size, however long a request is.
"""

from __future__ import annotations

import math
from typing import Literal

from pipeline.serving.fit.shape import Architecture, Compressed, Gqa, Linear, Mixer, Mla
from pipeline.serving.fit.units import share

Kv = Literal["bf16", "fp8"]
KV_BYTES: dict[str, int] = {"bf16": 2, "fp8": 1}
_STATE_BYTES = 4  # both engines keep states of linear attention in float32 by default
_SCALE_RUN, _SCALE_BYTES = 128, 4  # of fp8 beside sparse attention: a float32 for 128 values


def kv_token_bytes(model: Architecture, tp: int, kv: Kv) -> int:
    """What one more token costs in the layers that keep all of them."""
    total = 0.0
    for mixer in model.mixers:
        indexer, attention = mixer.indexer, mixer.attention
        if isinstance(attention, Compressed):
            index = attention.index_head + _SCALE_BYTES if attention.index_head else 0
            entry = _entry(model, mixer, tp, kv) + index
            total += mixer.layers * entry / attention.ratio if attention.ratio else 0
        else:
            if indexer:
                scales = share(indexer.head, _SCALE_RUN) * _SCALE_BYTES
                total += mixer.layers * (indexer.head + scales)
            total += 0 if mixer.window else mixer.layers * _entry(model, mixer, tp, kv)
    return math.ceil(total)


def window_token_bytes(model: Architecture, tp: int, kv: Kv) -> int:
    """What a token costs in the layers with a window, while it is inside."""
    windows = (m for m in model.mixers if m.window)
    return sum(m.layers * _entry(model, m, tp, kv) for m in windows)


def request_bytes(
    model: Architecture, tp: int, kv: Kv, context: int, *, in_flight: int = 1, states: int = 1
) -> int:
    """What a request costs besides: its windows and its states.

    vLLM keeps all tokens of a prefill step beside a window, and a state more for its prefix cache.
    """
    total = 0
    for mixer in model.mixers:
        if mixer.window:
            tokens = min(mixer.window - 1 + in_flight, context)
            total += mixer.layers * tokens * _entry(model, mixer, tp, kv)
        csa = mixer.attention
        if isinstance(csa, Compressed) and csa.ratio:
            # keys and scores of runs that are not full yet, in float32 (vLLM: CompressorStateCache)
            overlap = 2 if csa.ratio == 4 else 1  # runs of 4 overlap
            tokens = min(overlap * csa.ratio - 1 + in_flight, context)
            values = tokens * 2 * overlap * (csa.head + csa.index_head)
            total += mixer.layers * values * _STATE_BYTES
    return total + states * state_bytes(model, tp)


def state_bytes(model: Architecture, tp: int) -> int:
    """A state of linear attention, in all layers."""
    total = 0
    for mixer in model.mixers:
        if isinstance(linear := mixer.attention, Linear):
            conv = linear.conv * model.precision.base.bits // 8
            total += mixer.layers * share(linear.state * _STATE_BYTES + conv, tp)
    return total


def _entry(model: Architecture, mixer: Mixer, tp: int, kv: Kv) -> int:
    """One token in one layer: MLA's latent is on every card, heads are divided.

    fp8 caches of both engines have one scale for a whole tensor, so a token costs one byte a value;
    sparse attention has scales of its own and keeps positions in 16 bits (vLLM: fp8_ds_mla, 656
    bytes, and 584 in DeepSeek V4).
    """
    match mixer.attention:
        case Mla() as mla if kv == "fp8" and any(m.indexer for m in model.mixers):
            scales = share(mla.kv_rank, _SCALE_RUN) * _SCALE_BYTES
            return mla.kv_rank + scales + 2 * mla.rope
        case Mla() as mla:
            return (mla.kv_rank + mla.rope) * KV_BYTES[kv]
        case Gqa() as gqa:
            return share(gqa.kv_heads, tp) * (gqa.head + gqa.value) * KV_BYTES[kv]
        case Compressed() as csa:
            return csa.head + 72 if kv == "fp8" else 2 * csa.head
    return 0
