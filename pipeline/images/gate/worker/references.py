"""What each engine function should compute, from its arguments, by definition and in float64.

One function for each meaning a call can have. It reads the arguments as the engine's documentation
describes them (which rows belong to which sequence, where its cached keys lie, who may see what)
and leaves the arithmetic to `attention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from .attention import Expected, Keys, attend, causal, picked, rounded, together
from .errors import Json

Outputs = dict[str, Expected]


def _bounds(indptr: Any) -> list[tuple[int, int]]:
    ends = indptr.tolist()
    return list(itertools.pairwise(ends))


def _number(value: Any) -> float:
    return float(value.reshape(-1)[0]) if hasattr(value, "reshape") else float(value)


def _is_fp8(tensor: Any) -> bool:
    return bool(tensor.element_size() == 1)


def _mask(a: Json, seq: int, rows: int, keys: int) -> Any:
    """A sequence's own mask: for each new token, one number for each key from the first on."""
    start = int(a["mask_indptr"][seq])
    return a["custom_mask"][start : start + rows * keys].reshape(rows, keys).bool()


def extend_attention(a: Json) -> Outputs:
    """SGLang's prefill: new tokens see their sequence's cached prefix and the new ones so far.

    A custom mask takes the place of the causal one among the new tokens; over the prefix it counts
    only with skip_prefix_custom_mask=False. Queries are multiplied with cached keys in the cache's
    type, so with an fp8 cache they are rounded to fp8 there.
    """
    k_scale, v_scale = (_number(a.get(name, 1.0)) for name in ("k_scale", "v_scale"))
    window = a.get("sliding_window_size", -1)
    results = []
    for seq, (start, end) in enumerate(_bounds(a["qo_indptr"])):
        first, last = _bounds(a["kv_indptr"])[seq]
        place, rows, prefix = a["kv_indices"][first:last], end - start, last - first
        q, new = a["q_extend"][start:end], slice(start, end)
        seen = causal(rows, prefix + rows, window=window)
        if not a["is_causal"]:
            seen |= True
        if a["custom_mask"] is not None:
            own = _mask(a, seq, rows, prefix + rows)
            seen[:, prefix:] = own[:, prefix:]
            if not a.get("skip_prefix_custom_mask", True):
                seen &= own
        k, v = picked(a["k_buffer"], place), picked(a["v_buffer"], place)
        cached_q = rounded(q, k.dtype) if _is_fp8(k) else q
        cached = Keys(cached_q.double() * k_scale, k.double(), v.double() * v_scale)
        parts = [
            cached._replace(allowed=seen[:, :prefix]),
            Keys(q, a["k_extend"][new], a["v_extend"][new], seen[:, prefix:]),
        ]
        results.append(attend(parts, a["sm_scale"], a.get("logit_cap"), a.get("sinks")))
    return {"o_extend": together(results)}


def extend_attention_unified(a: Json) -> Outputs:
    """SGLang's deterministic prefill: prefix and new tokens all lie in the cache."""
    scale = a["sm_scale"] * _number(a.get("k_scale", 1.0))
    results = []
    for seq, (start, end) in enumerate(_bounds(a["qo_indptr"])):
        first, last = _bounds(a["kv_indptr"])[seq]
        place, rows = a["kv_indices"][first:last], end - start
        seen = causal(rows, last - first, window=a.get("sliding_window_size", -1))
        if a.get("custom_mask") is not None:
            seen = _mask(a, seq, rows, last - first)
        v = picked(a["v_buffer"], place).double() * _number(a.get("v_scale", 1.0))
        keys = Keys(a["q"][start:end], picked(a["k_buffer"], place), v, seen)
        results.append(attend([keys], scale, a.get("logit_cap"), a.get("sinks")))
    return {"o": together(results)}


def decode_attention(a: Json) -> Outputs:
    """SGLang's decode: one new token for each sequence sees all of its cached keys."""
    scale = a["sm_scale"] * _number(a.get("k_scale", 1.0))
    results = []
    for seq, (first, last) in enumerate(_bounds(a["kv_indptr"])):
        place = a["kv_indices"][first:last]
        v = picked(a["v_buffer"], place).double() * _number(a.get("v_scale", 1.0))
        keys = Keys(a["q"][seq : seq + 1], picked(a["k_buffer"], place), v)
        results.append(attend([keys], scale, a.get("logit_cap"), a.get("sinks")))
    return {"o": together(results)}


def prefill_attention(a: Json) -> Outputs:
    """Attention over whole inputs without a cache, as vision towers do it."""
    # the usual scale, where the call leaves it to the function
    scale = a.get("sm_scale") or a["q"].shape[-1] ** -0.5
    results = []
    for start, rows in zip(a["b_start_loc"].tolist(), a["b_seq_len"].tolist(), strict=True):
        own = slice(start, start + rows)
        seen = causal(rows, rows) if a["is_causal"] else None
        results.append(attend([Keys(a["q"][own], a["k"][own], a["v"][own], seen)], scale))
    return {"o": together(results)}


def _dequantized(cache: Any, scale: Any, q: Any) -> Any:
    """vLLM brings an fp8 cache to the queries' type before it multiplies."""
    if not _is_fp8(cache):
        return cache
    return rounded(cache.float() * _number(scale), q.dtype)


def paged_decode_attention(a: Json) -> Outputs:
    """vLLM's decode: each sequence's keys lie in pages that its row of the table names."""
    q, results = a["q"], []
    for seq, length in enumerate(a["b_seq_len"].tolist()):
        pages = a["req_to_token"][seq]
        k, v = (picked(a[name], pages).flatten(0, 1)[:length] for name in ("k_buffer", "v_buffer"))
        # with MLA the values are the latent key itself, as it was dequantized
        v_scale = a["k_scale"] if a.get("is_mla") else a["v_scale"]
        k, v = _dequantized(k, a["k_scale"], q), _dequantized(v, v_scale, q)
        keys = Keys(q[seq : seq + 1], k, v)
        results.append(attend([keys], a["sm_scale"], a.get("logit_cap")))
    attended = together(results)
    # the logarithm is a float32 sum of exponentials: compared as it is
    weight = Expected(attended.weight, attended.weight.abs() + 1.0)
    return {"o": attended, "lse": weight}


def prefix_prefill(a: Json) -> Outputs:
    """vLLM's chunked prefill: cached pages in the paged-attention layout, new tokens beside them.

    Keys are [page, kv head, head/x, token, x], values [page, kv head, head, token].
    """
    q, results = a["q"], []
    for seq, (start, end) in enumerate(_bounds(a["b_start_loc"])):
        rows = end - start
        prefix = int(a["b_seq_len"][seq]) - rows
        pages = a["b_loc"][seq]
        k = picked(a["k_cache"], pages).permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
        v = picked(a["v_cache"], pages).permute(0, 3, 1, 2).flatten(0, 1)
        k, v = _dequantized(k, a["k_scale"], q), _dequantized(v, a["v_scale"], q)
        # a window of n tokens holds the query's own and the n - 1 before it
        seen = causal(rows, prefix + rows, window=(a.get("sliding_window") or 0) - 1)
        new = slice(start, end)
        parts = [
            Keys(q[new], k[:prefix], v[:prefix], seen[:, :prefix]),
            Keys(q[new], a["k"][new], a["v"][new], seen[:, prefix:]),
        ]
        results.append(attend(parts, a["sm_scale"], sinks=a.get("sinks")))
    return {"o": together(results)}


def unified_attention(a: Json) -> Outputs:
    """vLLM's one kernel for prefill and decode: all keys lie in pages."""
    q, results = a["q"], []
    for seq, (start, end) in enumerate(_bounds(a["cu_seqlens_q"])):
        length = int(a["seqused_k"][seq])
        pages = a["block_table"][seq]
        k, v = (picked(a[name], pages).flatten(0, 1)[:length] for name in ("k", "v"))
        k, v = _dequantized(k, a["k_descale"], q), _dequantized(v, a["v_descale"], q)
        keys = Keys(q[start:end], k, v, causal(end - start, length, window=a["window_size"][0]))
        results.append(attend([keys], a["softmax_scale"], a["softcap"], a.get("sinks")))
    return {"out": together(results)}


def _tokens(a: Json) -> Any:
    """A mixture's rows as numbers: 8-bit ones times their scale, for all, each row or each group.

    SGLang is given rows of 16 bits and narrows them itself: by a scale it is given, else by their
    largest magnitudes.
    """
    rows = a["A"]
    tokens, hidden = rows.shape
    if rows.element_size() == 1:
        by_row = a["A_scale"].double().reshape(-1, a["A_scale"].shape[-1])
        wide = a["block_shape"][1] if a.get("block_shape") else hidden
        return rows.double() * by_row.repeat_interleave(wide, 1)[:, :hidden]
    if not a.get("use_fp8_w8a8"):
        return rows.double()
    return _narrowed(rows.float(), a).double().reshape(tokens, hidden)


def _narrowed(rows: Any, a: Json) -> Any:
    """Rows as fp8 holds them when the largest of a group is its largest number.

    In float32, as engines narrow: another rounding of a quotient is another fp8 number.
    """
    import torch

    tokens, hidden = rows.shape
    if a["block_shape"]:
        groups = rows.reshape(-1, a["block_shape"][1])
    else:
        groups = rows.reshape((tokens, hidden) if a["per_channel_quant"] else (1, -1))
    given = a.get("A_scale")
    # 448 is the largest finite float8_e4m3fn
    scale = groups.abs().amax(1, keepdim=True) / 448.0 if given is None else _number(given)
    return rounded(groups / scale, torch.float8_e4m3fn) * scale


def _experts(a: Json) -> Any:
    """A mixture's matrices as numbers, each times the scale of its expert, row, group or block."""

    packed, scale = a["B"], a.get("B_scale")
    zeros = a.get("B_zp")
    if a.get("use_int4_w4a16"):
        # two numbers to a byte, the first in the lower half; 8 stands for zero
        matrices = _halves(packed, -1).double()
        zero: Any = 8.0 if zeros is None else _halves(zeros, 1).double()
    else:
        matrices = packed.double()
        zero = 128.0 if a.get("use_int8_w8a16") else 0.0
        zero = zero if zeros is None else zeros.double()
    if zeros is not None:
        # a zero of its own for each row and group, as AWQ has them
        zero = zero.repeat_interleave(a["block_shape"][1], 2)[:, :, : matrices.shape[2]]
    matrices = matrices - zero
    if scale is None:
        return matrices
    experts, inner, hidden = matrices.shape
    high, wide = a.get("block_shape") or (0, 0)
    by_expert = scale.double().reshape(experts, -1, scale.shape[-1] if wide else 1)
    spread = by_expert.repeat_interleave(high or 1, 1).repeat_interleave(wide or 1, 2)
    matrices = matrices * spread[:, :inner, :hidden]
    # widened to the rows' type before they are multiplied, which rounds them once
    narrow = a.get("use_int4_w4a16") or a.get("use_int8_w8a16")
    return rounded(matrices, a["A"].dtype) if narrow and wide else matrices


def _halves(packed: Any, dim: int) -> Any:
    """Both numbers of every byte, one after the other along a dimension."""
    import torch

    dim %= packed.ndim
    return torch.stack([packed & 15, packed >> 4], dim=dim + 1).flatten(dim, dim + 1)


def fused_moe(a: Json) -> Outputs:
    """One of a mixture's two matrix products: each chosen pair of token and expert gets its row.

    sorted_token_ids lists the pairs expert by expert in blocks, padded with a number past the end.
    Blocks of experts that another rank has are marked -1, and their rows are zeros.
    The sum is kept in float32 and only its result is rounded, so what an error is measured by is
    the result itself, and a 256th of what was added up: 16 bits lose more than that on the way.
    """
    import torch

    tokens, chosen = a["topk_weights"].shape
    rows, matrices = _tokens(a), _experts(a)
    bias = a.get("bias") if a.get("bias") is not None else a.get("B_bias")
    inner = matrices.shape[1]
    # a pair that no block names stays NaN, which nothing equals
    want = torch.full((tokens * chosen, inner), float("nan"), dtype=torch.float64)
    size, block = want.clone(), a["config"]["BLOCK_SIZE_M"]
    used = int(a["num_tokens_post_padded"][0])
    for place, pair in enumerate(a["sorted_token_ids"][:used].tolist()):
        # it only fills its block
        if pair >= tokens * chosen:
            continue
        expert = int(a["expert_ids"][place // block])
        if expert < 0:
            want[pair] = size[pair] = 0.0
            continue
        # top_k is 1 for the second product, whose rows are the pairs themselves
        row, matrix = rows[pair // a["top_k"]], matrices[expert]
        weight = _number(a["topk_weights"].reshape(-1)[pair]) if a["mul_routed_weight"] else 1.0
        more = 0.0 if bias is None else bias[expert].double()
        want[pair] = (matrix @ row + more) * weight
        added = matrix.abs() @ row.abs() * abs(weight)
        size[pair] = want[pair].abs() + added / 256
    shape = (tokens, chosen, inner)
    return {"C": Expected(want.reshape(shape), size.reshape(shape))}


REFERENCES: dict[str, Callable[[Json], Outputs]] = {
    "extend-attention": extend_attention,
    "extend-attention-unified": extend_attention_unified,
    "decode-attention": decode_attention,
    "prefill-attention": prefill_attention,
    "paged-decode-attention": paged_decode_attention,
    "prefix-prefill": prefix_prefill,
    "unified-attention": unified_attention,
    "fused-moe": fused_moe,
}
