# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202
"""Attention over whole inputs, block by block, as engines write it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _tiny_kernel(
    Q,
    K,
    V,
    Out,
    Starts,
    Lengths,
    scale,
    stride_token,
    stride_head,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    start, length = tl.load(Starts + tl.program_id(0)), tl.load(Lengths + tl.program_id(0))
    head = tl.program_id(1) * stride_head
    row = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, HEAD)
    here = (start + row[:, None]) * stride_token + head + column[None, :]
    q = tl.load(Q + here, mask=row[:, None] < length, other=0.0)
    most = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, HEAD], tl.float32)
    for first in range(0, length, BLOCK):
        key = first + tl.arange(0, BLOCK)
        there = (start + key[:, None]) * stride_token + head + column[None, :]
        k = tl.load(K + there, mask=key[:, None] < length, other=0.0)
        v = tl.load(V + there, mask=key[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = key[None, :] < length
        if CAUSAL:
            seen = seen & (row[:, None] >= key[None, :])
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(most, tl.max(scores, 1))
        p = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        again = tl.exp(most - higher)
        total = total * again + tl.sum(p, 1)
        acc = acc * again[:, None] + tl.dot(p.to(v.dtype), v)
        most = higher
    tl.store(Out + here, acc / total[:, None], mask=row[:, None] < length)


def attention(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    b_start_loc: Any,
    b_seq_len: Any,
    max_input_len: int,
    is_causal: bool,
) -> None:
    """Attend over several inputs that lie one after the other."""
    block = 32 if torch.cuda.get_device_capability()[0] == 12 else 128
    grid = (len(b_seq_len), q.shape[1], triton.cdiv(max_input_len, block))
    _tiny_kernel[grid](
        *(q, k, v, o, b_start_loc, b_seq_len, q.shape[-1] ** -0.5, q.stride(0), q.stride(1)),
        **{"HEAD": q.shape[-1], "BLOCK": block, "CAUSAL": is_causal},
        **{"num_warps": 4, "num_stages": 1},
    )
