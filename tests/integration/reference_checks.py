"""Is the reference itself right? Runs in a gate's environment, which has torch:

    python reference_checks.py WORKER

Each check compares with torch's own attention or with numbers worked out by hand.
"""

from __future__ import annotations

import importlib
import math
import runpy
import sys
from typing import Any


def checks(worker: str) -> None:
    runpy.run_path(f"{worker}/__main__.py", run_name="loaded")["load"]()
    attention: Any = importlib.import_module("gate_worker.attention")
    references: Any = importlib.import_module("gate_worker.references")
    by_hand(attention)
    against_torch(attention)
    masks(attention)
    layouts(references)
    mixture(references)
    narrow_mixtures(references)
    routes(importlib.import_module("gate_worker.arguments"))
    quantization(importlib.import_module("gate_worker.operators"))
    rounding(importlib.import_module("gate_worker.interpreter"))


def by_hand(attention: Any) -> None:
    """Two keys with scores 0 and ln 3: shares 1/4 and 3/4."""
    import torch

    q = torch.tensor([[[1.0]]])
    k = torch.tensor([[[0.0]], [[math.log(3)]]], dtype=torch.float64)
    v = torch.tensor([[[8.0, 0.0]], [[0.0, -4.0]]])
    result = attention.attend([attention.Keys(q, k, v)], 1.0)
    assert torch.allclose(result.want, torch.tensor([[[2.0, -3.0]]], dtype=torch.float64))
    assert torch.allclose(result.size, torch.tensor([[[2.0, 3.0]]], dtype=torch.float64))
    assert abs(float(result.weight) - math.log(4)) < 1e-12
    # the same keys in two parts are the same keys
    parts = [attention.Keys(q, k[:1], v[:1]), attention.Keys(q, k[1:], v[1:])]
    assert torch.equal(attention.attend(parts, 1.0).want, result.want)


def against_torch(attention: Any) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as theirs

    torch.manual_seed(3)
    q, k, v = (torch.randn(n, h, 24).double() for n, h in ((7, 6), (19, 2), (19, 2)))
    seen = attention.causal(7, 19)
    result = attention.attend([attention.Keys(q, k, v, seen)], 0.3).want
    wide_k, wide_v = (x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (k, v))
    want = theirs(q.transpose(0, 1), wide_k, wide_v, attn_mask=seen, scale=0.3).transpose(0, 1)
    assert torch.allclose(result, want, atol=1e-12)
    wrong = theirs(q.transpose(0, 1), wide_k, wide_v, scale=0.3).transpose(0, 1)
    assert not torch.allclose(result, wrong, atol=1e-3)


def masks(attention: Any) -> None:
    assert attention.causal(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert attention.causal(2, 4, window=1).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]


def layouts(references: Any) -> None:
    """One token, cached keys wherever they lie: all ways to store them give the same result."""
    import torch

    torch.manual_seed(5)
    q, keys, values = torch.randn(1, 2, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    cache_k, cache_v = torch.zeros(9, 2, 16), torch.zeros(9, 2, 16)
    place = torch.tensor([7, 2, 5, 0, 8, 3])
    cache_k[place], cache_v[place] = keys, values
    plain = {"q": q, "k_buffer": cache_k, "v_buffer": cache_v, "sm_scale": 0.25}
    plain.update(kv_indptr=torch.tensor([0, 6]), kv_indices=place)
    want = references.decode_attention(plain)["o"].want
    ones = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    pages = torch.tensor([[2, 0, 1]])
    paged_k, paged_v = torch.zeros(3, 2, 2, 16), torch.zeros(3, 2, 2, 16)
    paged_k[pages[0]], paged_v[pages[0]] = keys.reshape(3, 2, 2, 16), values.reshape(3, 2, 2, 16)
    paged = {**ones, "q": q, "k_buffer": paged_k, "v_buffer": paged_v, "sm_scale": 0.25}
    paged.update(b_seq_len=torch.tensor([6]), req_to_token=pages)
    assert torch.equal(references.paged_decode_attention(paged)["o"].want, want)
    unified = {"q": q, "k": paged_k, "v": paged_v, "softmax_scale": 0.25, "block_table": pages}
    unified.update(cu_seqlens_q=torch.tensor([0, 1]), seqused_k=torch.tensor([6]))
    unified.update(k_descale=None, v_descale=None, window_size=(-1, -1), softcap=0)
    assert torch.equal(references.unified_attention(unified)["out"].want, want)
    # five cached and the sixth new
    extend = {**plain, "q_extend": q, "k_extend": keys[5:], "v_extend": values[5:]}
    extend.update(qo_indptr=torch.tensor([0, 1]), kv_indptr=torch.tensor([0, 5]))
    extend.update(custom_mask=None, is_causal=True)
    result = references.extend_attention(extend)["o_extend"].want
    assert torch.allclose(result, want, atol=1e-12)
    # the paged-attention layout: keys in groups of eight numbers
    old_k = paged_k.permute(0, 2, 3, 1).reshape(3, 2, 2, 8, 2).transpose(3, 4).contiguous()
    old_v = paged_v.permute(0, 2, 3, 1).contiguous()
    prefix = {**ones, "q": q, "k": keys[5:], "v": values[5:], "k_cache": old_k, "v_cache": old_v}
    prefix.update(b_start_loc=torch.tensor([0, 1]), b_seq_len=torch.tensor([6]), b_loc=pages)
    result = references.prefix_prefill({**prefix, "sm_scale": 0.25})["o"].want
    assert torch.allclose(result, want, atol=1e-12)


def mixture(references: Any) -> None:
    """Two tokens, each with two of three experts that multiply by 1, 10 and 100."""
    import torch

    experts = torch.tensor([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    given = {
        **{"A": torch.tensor([[2.0], [3.0]]), "B": experts, "top_k": 2},
        "topk_weights": torch.tensor([[0.5, 1.0], [2.0, 4.0]]),
        # pairs (token, choice): 0 and 3 go to expert 2, 1 to expert 0, 2 to expert 1
        "sorted_token_ids": torch.tensor([1, 4, 2, 4, 0, 3]),
        "expert_ids": torch.tensor([0, 1, 2]),
        "num_tokens_post_padded": torch.tensor([6]),
        **{"config": {"BLOCK_SIZE_M": 2}, "mul_routed_weight": False},
    }
    result = references.fused_moe(given)["C"].want
    assert result.reshape(-1).tolist() == [200.0, 2.0, 30.0, 300.0]
    weighed = references.fused_moe({**given, "mul_routed_weight": True})["C"].want
    assert weighed.reshape(-1).tolist() == [100.0, 2.0, 60.0, 1200.0]
    # fp8: one scale for the tokens, one for each expert
    scaled = {**given, "use_fp8_w8a8": True, "block_shape": None, "A_scale": torch.tensor([2.0])}
    scaled["A"] = scaled["A"].to(torch.float8_e4m3fn)
    scaled["B_scale"] = torch.tensor([1.0, 0.5, 0.25])
    assert references.fused_moe(scaled)["C"].want.reshape(-1).tolist() == [100.0, 4.0, 30.0, 150.0]
    # one scale for each block of a number by a number: here for each number
    blocks = {**scaled, "block_shape": [1, 1], "A_scale": torch.tensor([[2.0], [4.0]])}
    blocks["B_scale"] = scaled["B_scale"].reshape(3, 1, 1)
    assert references.fused_moe(blocks)["C"].want.reshape(-1).tolist() == [100.0, 4.0, 60.0, 300.0]


def narrow_mixtures(references: Any) -> None:
    """Weights and rows of 8 and 4 bits, as their bytes say by hand."""
    import torch

    one = {
        **{"topk_weights": torch.ones(1, 1), "top_k": 1, "mul_routed_weight": False},
        **{"sorted_token_ids": torch.tensor([0]), "expert_ids": torch.tensor([0])},
        **{"num_tokens_post_padded": torch.tensor([1]), "config": {"BLOCK_SIZE_M": 1}},
    }
    rows = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.bfloat16)

    def product(**more: Any) -> list[float]:
        result: list[float] = references.fused_moe({**one, "A": rows, **more})["C"].want[0, 0]
        return [float(x) for x in result]

    # 0x98: first 8 (zero), then 9 (one); 0xA7: first 7 (minus one), then 10 (two)
    packed = torch.tensor([[[0x98, 0xA7]]], dtype=torch.uint8)
    by_group = torch.tensor([[[10.0, 100.0]]])
    int4 = {"use_int4_w4a16": True, "B": packed, "B_scale": by_group, "block_shape": [0, 2]}
    assert product(**int4) == [10 * 2 + 100 * (-4 + 16)]
    eight = torch.tensor([[[128, 129, 127, 130]]], dtype=torch.uint8)
    int8 = {"use_int8_w8a16": True, "B": eight, "B_scale": by_group, "block_shape": [0, 2]}
    assert product(**int8) == [10 * 2 + 100 * (-4 + 16)]
    # fp8 with a scale for each channel; powers of two, which fp8 holds as they are
    fp8 = {"use_fp8_w8a8": True, "block_shape": None, "per_channel_quant": True}
    fp8["B"] = torch.tensor([[[1.0] * 4, [2.0] * 4]]).to(torch.float8_e4m3fn)
    fp8["B_scale"] = torch.tensor([[[1.0], [10.0]]])
    given = {"A": rows.to(torch.float8_e4m3fn), "A_scale": torch.tensor([[3.0]])}
    assert product(**fp8, **given) == [45.0, 900.0]
    # rows of 16 bits are narrowed: 8 becomes 448, and what 1 becomes is held to 4 digits
    assert product(**fp8, A_scale=None) == [15.0, 300.0]
    odd = torch.tensor([[1.0, 1.0, 1.0, 448.0 / 17]], dtype=torch.float64)
    (narrowed, _) = product(**fp8, A=odd.float(), A_scale=None)
    assert abs(narrowed - (3 * 16 / 17 + 448 / 17)) < 1e-5
    static = product(**{**fp8, "per_channel_quant": False}, A_scale=torch.tensor([1.0]))
    assert static == [15.0, 300.0]


def routes(arguments: Any) -> None:
    """Four pairs of three experts, in blocks of two."""
    made = {"config": {"BLOCK_SIZE_M": 2}}

    def part(name: str) -> list[int]:
        wanted = {"part": name, "to": [2, 0, 1, 2], "config": "config"}
        result: list[int] = arguments.routed(wanted, made).tolist()
        return result

    assert part("pairs") == [1, 4, 2, 4, 0, 3]
    assert part("experts") == [0, 1, 2]
    assert part("count") == [6]


def quantization(operators: Any) -> None:
    """What the largest number becomes, and where the others then lie."""
    import torch

    rows = torch.tensor([[1.0, -4.0, 2.0, 0.5], [0.0, 0.25, -0.5, 0.125]], dtype=torch.bfloat16)
    narrow, one, each = torch.empty(2, 4).to(torch.float8_e4m3fn), torch.zeros(1), torch.ones(2, 1)
    operators.per_tensor_quant_fp8(rows, narrow, one)
    assert abs(float(one) - 4 / 448) < 1e-9
    assert narrow.float()[0].tolist() == [112.0, -448.0, 224.0, 56.0]
    operators.per_token_quant_fp8(rows, narrow, each)
    assert torch.allclose(each, torch.tensor([[4 / 448], [0.5 / 448]]))
    assert narrow.float()[1].tolist() == [0.0, 224.0, -448.0, 112.0]
    by_group = torch.zeros(2, 2)
    operators.per_token_group_quant_8bit(rows, narrow, by_group, 2, 1e-10, -448.0, 448.0)
    assert torch.allclose(by_group, torch.tensor([[4.0, 2.0], [0.25, 0.5]]) / 448)
    assert narrow.float()[0].tolist() == [112.0, -448.0, 448.0, 112.0]
    try:
        operators.per_token_group_quant_8bit(rows, narrow, by_group, 2, 1e-10, -448, 448, True)
    except operators.Stopped:
        return
    raise AssertionError("another way to quantize was taken for the plain one")


def rounding(interpreter: Any) -> None:
    """The interpreter's repaired conversions: to nearest even, and saturating as the card's."""
    import numpy as np
    import torch
    import triton.language as tl

    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 0.1, 1e9, -1e9], dtype=np.float32)
    narrow = interpreter.converted(values, tl.float32, tl.bfloat16, None)
    back = interpreter.converted(narrow, tl.bfloat16, tl.float32, None).view(np.float32)
    assert back.tolist()[:2] == [1.0, 1 + 2**-6]
    assert back.tolist() == torch.from_numpy(values).bfloat16().float().tolist()
    small = interpreter.converted(values, tl.float32, tl.float8e4nv, None)
    wide = interpreter.converted(small, tl.float8e4nv, tl.float32, None).view(np.float32)
    assert wide.tolist() == [1.0, 1.0, 0.1015625, 448.0, -448.0]


if __name__ == "__main__":
    checks(sys.argv[1])
    print("right")
