"""Defects planted in the pinned engines, each by one exact replacement, and who must catch them."""

from __future__ import annotations

from dataclasses import dataclass

EXTEND = "sglang/srt/layers/attention/triton_ops/extend_attention.py"
PREFILL = "sglang/kernels/ops/attention/prefill_attention.py"
DECODE = "vllm/v1/attention/ops/triton_decode_attention.py"
K2_DECODE = "sglang/srt/layers/attention/triton_ops/decode_attention.py"
VLLM_UNIFIED = "vllm/v1/attention/ops/triton_unified_attention.py"
VLLM_PREFIX = "vllm/v1/attention/ops/prefix_prefill.py"
K2_MOE = "sglang/srt/layers/moe/fused_moe_triton/fused_moe_triton_kernels.py"
SGLANG_MOE = "sglang/kernels/ops/moe/fused_moe_triton_kernels.py"
VLLM_MOE = "vllm/model_executor/layers/fused_moe/fused_moe.py"


@dataclass(frozen=True)
class Mutant:
    """A defect: in which image's engine, what is written instead of what, which case tells.

    `gate` is `smem` (does it fit?) or `numerics` (is it right?); `want` is the verdict that counts
    as caught, and `words` must be among the verdict's words: caught for the right reason.
    """

    name: str
    image: str
    file: str
    old: str
    new: str
    gate: str
    case: str
    want: str
    message: str


def _numbers(
    name: str, image: str, file: str, case: str, old: str, new: str, message: str = "is off by"
) -> Mutant:
    return Mutant(name, image, file, old, new, "numerics", case, "wrong", message)


def _fit(
    name: str, image: str, file: str, case: str, old: str, new: str, want: str, message: str
) -> Mutant:
    return Mutant(name, image, file, old, new, "smem", case, want, message)


WARPS = "        num_warps = 4 if Lq <= 64 else 8\n"
LAUNCH = "        num_stages=num_stages,\n        Lk=Lk,\n        Lv=Lv,\n        IS_MLA=is_mla,\n"
MLA, GQA = "extend-mla-576-512", "extend-gqa-128"

MUTANTS = [
    _fit(
        "block of the patch four times too wide",
        *("sglang-k2", EXTEND, MLA, WARPS, f"        BLOCK_N *= 4\n{WARPS}"),
        *("failed", "_fwd_kernel needs"),
    ),
    _fit(
        "prefill block four times too wide",
        *("sglang", PREFILL, "prefill-256", "        BLOCK_N=BLOCK,\n"),
        *("        BLOCK_N=4 * BLOCK,\n", "failed", "_fwd_kernel needs"),
    ),
    _fit(
        "one pipeline stage more",
        *("vllm", DECODE, "mla-decode-fp8-16-8", LAUNCH),
        *(LAUNCH.replace("=num_stages,", "=num_stages + 1,"), "failed", "needs 102400 bytes"),
    ),
    _fit(
        "one warp where four share the registers",
        *("vllm", DECODE, "mla-decode-fp8-16-8", f"        num_warps=4,\n{LAUNCH}"),
        *(f"        num_warps=1,\n{LAUNCH}", "failed", "spills"),
    ),
    _fit(
        "function renamed",
        *("sglang-k2", EXTEND, MLA, "def extend_attention_fwd(\n"),
        *("def extend_attention_forward(\n", "unknown", "no such function in this version"),
    ),
    _fit(
        "function raises",
        *("sglang-k2", EXTEND, MLA, "    SKIP_PREFIX_CUSTOM_MASK = skip_prefix_custom_mask\n"),
        *("    raise RuntimeError('not on this card')\n", "unknown", "not on this card"),
    ),
    _fit(
        "kernel does not compile",
        *("sglang-k2", EXTEND, MLA, "            qk = tl.dot(q, k, out_dtype=tl.float32)\n"),
        *("            qk = tl.dot(q, q, out_dtype=tl.float32)\n", "unknown", ""),
    ),
    _numbers(
        "K read in place of V",
        *("sglang-k2", EXTEND, GQA, "                V_Extend + offs_v, mask"),
        "                K_Extend + offs_v, mask",
    ),
    _numbers(
        "causal mask off by one",
        *("sglang-k2", EXTEND, MLA),
        "mask_causual = (cur_block_m * BLOCK_M + offs_m[:, None]) >= (",
        "mask_causual = 1 + (cur_block_m * BLOCK_M + offs_m[:, None]) >= (",
    ),
    _numbers(
        "custom mask ignored",
        *("sglang-k2", EXTEND, f"{MLA}-mask"),
        "            custom_mask &= mask_m[:, None] & mask_n[None, :]\n"
        "            final_mask &= custom_mask\n",
        "            custom_mask &= mask_m[:, None] & mask_n[None, :]\n",
    ),
    _numbers(
        "softmax scale forgotten over the prefix",
        *("sglang-k2", EXTEND, MLA),
        "                qk += tl.dot(qpe.to(kpe.dtype), kpe)\n            qk *= sm_scale\n",
        "                qk += tl.dot(qpe.to(kpe.dtype), kpe)\n",
    ),
    _numbers(
        "rotary part of the key left out",
        *("sglang-k2", EXTEND, MLA),
        "                qk += tl.dot(qpe, kpe)\n",
        "                qk += 0.0 * tl.dot(qpe, kpe)\n",
    ),
    _numbers(
        "cached keys read with the wrong stride",
        *("sglang-k2", EXTEND, GQA),
        "        o_extend.stride(1),\n        k_buffer.stride(0),\n",
        "        o_extend.stride(1),\n        k_buffer.stride(1),\n",
    ),
    _numbers(
        "prefix one token too short",
        *("sglang-k2", EXTEND, MLA),
        "cur_seq_len_prefix = tl.load(kv_indptr + cur_seq + 1) - cur_seq_kv_start_idx",
        "cur_seq_len_prefix = tl.load(kv_indptr + cur_seq + 1) - cur_seq_kv_start_idx - 1",
    ),
    _numbers(
        "what was added up is not rescaled (extend)",
        *("sglang-k2", EXTEND, MLA),
        "            acc = acc * re_scale[:, None] + tl.dot(p, v)\n\n"
        "            e_max = n_e_max\n\n    # stage 2",
        "            acc = acc + tl.dot(p, v)\n\n            e_max = n_e_max\n\n    # stage 2",
    ),
    _numbers(
        "heads written in the wrong order",
        *("sglang-k2", EXTEND, GQA),
        "        * stride_obs\n        + cur_head * stride_oh\n",
        "        * stride_obs\n        + (cur_head ^ 1) * stride_oh\n",
    ),
    _numbers(
        "last row of every block not written",
        *("sglang-k2", EXTEND, MLA),
        "    mask_m = (cur_block_m * BLOCK_M + offs_m) < cur_seq_len_extend\n",
        "    mask_m = ((cur_block_m * BLOCK_M + offs_m) < cur_seq_len_extend)"
        " & (offs_m < BLOCK_M - 1)\n",
        "are missing",
    ),
    _numbers(
        "what was added up is not rescaled (prefill)",
        *("sglang", PREFILL, "prefill-128", "        acc = acc * acc_scale[:, None]\n"),
        "        acc = acc * 1.0\n",
    ),
    _numbers(
        "one key past the end of the sequence",
        *("sglang", PREFILL, "prefill-72"),
        '                (start_n + offs_n[None, :]) < cur_batch_seq_len, 0, float("-inf")',
        '                (start_n + offs_n[None, :]) <= cur_batch_seq_len, 0, float("-inf")',
    ),
    _numbers(
        "fp8 scale of the key forgotten",
        *("vllm", DECODE, "mla-decode-fp8-16-8"),
        "                k = (k.to(tl.float32) * ks).to(q.dtype)\n            qk = tl.dot(",
        "                k = k.to(tl.float32).to(q.dtype)\n            qk = tl.dot(",
    ),
    _numbers(
        "fp8 scale of the rotary part forgotten",
        *("vllm", DECODE, "mla-decode-fp8-16-16"),
        "kpe = (kpe.to(tl.float32) * ks).to(qpe.dtype)",
        "kpe = kpe.to(tl.float32).to(qpe.dtype)",
    ),
    _numbers(
        "what was added up is not rescaled (decode)",
        *("vllm", DECODE, "mla-decode-bf16-16-8", "            acc *= re_scale[:, None]\n"),
        "            acc *= 1.0\n",
    ),
    _numbers(
        "splits put together without their weights",
        *("vllm", DECODE, "mla-decode-bf16-64-8", "            acc *= old_scale\n"),
        "            acc *= 1.0\n",
    ),
    *(
        _numbers(f"{name} ({image})", image, file, case, old, new)
        for image, file in (("sglang-k2", K2_MOE), ("sglang", SGLANG_MOE))
        for name, case, old, new in (
            (
                "scales of an fp8 mixture forgotten, one for each expert",
                "moe-fp8-tensor-e128-6",
                "            b_scale = tl.load(b_scale_ptr + off_experts)\n",
                "            b_scale = 1.0\n",
            ),
            (
                "scales of an fp8 mixture forgotten, one for each channel",
                "moe-fp8-channel-e128-6",
                "            accumulator *= a_scale * b_scale\n",
                "            accumulator *= a_scale\n",
            ),
            (
                "scales of an fp8 mixture forgotten, one for each block",
                "moe-fp8-blocks-e128-6",
                "accumulator += tl.dot(a, b) * (a_scale[:, None] * b_scale)\n",
                "accumulator += tl.dot(a, b) * a_scale[:, None]\n",
            ),
            (
                "halves of int4 bytes swapped",
                "moe-int4-w4a16-6",
                "        b_shifter = (offs_k[:, None] % 2) * 4\n",
                "        b_shifter = (1 - offs_k[:, None] % 2) * 4\n",
            ),
            (
                "zero of int8 weights off by one",
                "moe-int8-w8a16-6",
                "        b_zp_num = 128\n",
                "        b_zp_num = 127\n",
            ),
            (
                "scales of int4 weights forgotten",
                "moe-int4-w4a16-6",
                "            b = ((b.to(tl.float32) - b_zp_num) * b_scale).to(compute_type)\n",
                "            b = (b.to(tl.float32) - b_zp_num).to(compute_type)\n",
            ),
        )
    ),
    _numbers(
        "scales of an fp8 mixture forgotten, one for each channel (vllm)",
        *("vllm", VLLM_MOE, "moe-fp8-channel-e128-6"),
        "        accumulator = accumulator * a_scale * b_scale\n",
        "        accumulator = accumulator * a_scale\n",
    ),
    _numbers(
        "scales of an fp8 mixture forgotten, one for each expert (vllm)",
        *("vllm", VLLM_MOE, "moe-fp8-tensor-e128-6"),
        "            b_scale = tl.load(b_scale_ptr + off_experts)\n",
        "            b_scale = 1.0\n",
    ),
    _numbers(
        "scales of an fp8 mixture forgotten, one for each block (vllm)",
        *("vllm", VLLM_MOE, "moe-fp8-blocks-e128-6"),
        "                    accumulator += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]",
        "                    accumulator += tl.dot(a, b) * a_scale[:, None]",
    ),
    _numbers(
        "scale of the wrong expert (vllm)",
        *("vllm", VLLM_MOE, "moe-fp8-tensor-e128-6"),
        "            b_scale = tl.load(b_scale_ptr + off_experts)\n",
        "            b_scale = tl.load(b_scale_ptr)\n",
    ),
    _numbers(
        "scales of int4 weights one group late (vllm)",
        *("vllm", VLLM_MOE, "moe-int4-w4a16-6"),
        "            + ((offs_k[:, None] + BLOCK_SIZE_K * k) // group_size) * stride_bsk\n",
        "            + ((offs_k[:, None] + BLOCK_SIZE_K * (k + 1)) // group_size) * stride_bsk\n",
    ),
    _numbers(
        "halves of int4 bytes swapped (vllm)",
        *("vllm", VLLM_MOE, "moe-int4-w4a16-6"),
        "        b_shifter = (offs_k[:, None] % 2) * 4\n",
        "        b_shifter = (1 - offs_k[:, None] % 2) * 4\n",
    ),
    _numbers(
        "zero of int8 weights off by one (vllm)",
        *("vllm", VLLM_MOE, "moe-int8-w8a16-6", "        b_zp_num = 128\n"),
        "        b_zp_num = 127\n",
    ),
    _numbers(
        "last split left out of the sum",
        *("sglang-k2", K2_DECODE, "decode-gqa-64"),
        "    for split_kv_id in range(0, MAX_KV_SPLITS):\n",
        "    for split_kv_id in range(0, MAX_KV_SPLITS - 1):\n",
    ),
    _numbers(
        "logit cap ignored (grouped decode)",
        *("sglang-k2", K2_DECODE, "decode-gqa-cap-80"),
        "qk += tl.dot(qpe, kpe.to(qpe.dtype))\n            qk *= sm_scale\n\n"
        "            if logit_cap > 0:\n",
        "qk += tl.dot(qpe, kpe.to(qpe.dtype))\n            qk *= sm_scale\n\n"
        "            if logit_cap > 1e9:\n",
    ),
    _numbers(
        "logit cap ignored (plain decode)",
        *("sglang-k2", K2_DECODE, "decode-mha-cap-72"),
        "            qk = tl.sum(q[None, :] * k, 1)\n            qk *= sm_scale\n\n"
        "            if logit_cap > 0:\n",
        "            qk = tl.sum(q[None, :] * k, 1)\n            qk *= sm_scale\n\n"
        "            if logit_cap > 1e9:\n",
    ),
    _numbers(
        "sinks ignored (decode)",
        *("sglang-k2", K2_DECODE, "decode-gqa-sinks-96"),
        "        e_sum += tl.exp(cur_sink - e_max)\n",
        "        e_sum += 0.0 * tl.exp(cur_sink - e_max)\n",
    ),
    _numbers(
        "head-dim mask of a decode's result missing",
        *("sglang-k2", K2_DECODE, "decode-gqa-cap-80"),
        "    mask_d = offs_d < Lv\n",
        "    mask_d = offs_d < BLOCK_DV\n",
        "",
    ),
    *(
        _numbers(
            f"head-dim mask missing, heads of {head}",
            *("sglang", PREFILL, case, "    mask_d = offs_d < Lk\n"),
            *("    mask_d = offs_d < 4 * Lk\n", ""),
        )
        for head, case in ((72, "prefill-72"), (80, "prefill-80"), (96, "prefill-causal-96"))
    ),
    _numbers(
        "sign of a mixture's bias",
        *("sglang-k2", K2_MOE, "moe-bf16-bias-6", "        accumulator += bias\n"),
        "        accumulator -= bias\n",
    ),
    *(
        _numbers(
            f"other ranks' experts not zeroed ({image})",
            *(image, file, case, f"    tl.store(c_ptrs, accumulator, mask=c_mask)\n\n\n{after}"),
            *(f"\n\n{after}", "are missing"),
        )
        for image, file, case, after in (
            (
                "sglang-k2",
                K2_MOE,
                "moe-bf16-ranks-6",
                "@triton.jit\ndef fused_moe_kernel_gptq_awq(",
            ),
            (
                "vllm",
                VLLM_MOE,
                "moe-int4-w4a16-ranks-6",
                "@triton.jit\ndef fused_moe_kernel_gptq_awq(",
            ),
        )
    ),
    *(
        _numbers(
            f"a mixture added up in {kind}",
            *("sglang-k2", K2_MOE, "moe-bf16-6"),
            "        else:\n            accumulator += tl.dot(a, b)\n        # Advance",
            f"        else:\n            accumulator = (accumulator + tl.dot(a, b)).to(tl.{kind})"
            ".to(tl.float32)\n        # Advance",
        )
        for kind in ("float16", "bfloat16")
    ),
    _numbers(
        "attention added up in float16 (extend)",
        *("sglang-k2", EXTEND, "extend-gqa-fp32-72"),
        "            acc = acc * re_scale[:, None] + tl.dot(p, v)\n\n"
        "            e_max = n_e_max\n\n    # stage 2",
        "            acc = (acc * re_scale[:, None] + tl.dot(p, v)).to(tl.float16).to(tl.float32)\n"
        "\n            e_max = n_e_max\n\n    # stage 2",
    ),
    # planted once, after the cases above: how many of new ones are caught the first time
    _numbers(
        "window of a prefix one token wider",
        *("sglang-k2", EXTEND, "extend-gqa-window-64"),
        "                cur_seq_len_prefix + cur_block_m * BLOCK_M + offs_m[:, None]\n"
        "            ) <= (start_n + offs_n[None, :] + SLIDING_WINDOW_SIZE)\n",
        "                cur_seq_len_prefix + cur_block_m * BLOCK_M + offs_m[:, None]\n"
        "            ) <= (start_n + offs_n[None, :] + SLIDING_WINDOW_SIZE + 1)\n",
    ),
    _numbers(
        "every head reads the first head of keys",
        *("sglang-k2", K2_DECODE, "decode-gqa-128"),
        "    cur_kv_head = cur_head_id // tl.cdiv(kv_group_num, BLOCK_H)\n",
        "    cur_kv_head = cur_head_id * 0\n",
    ),
    _numbers(
        "powers of two where e is meant",
        *("sglang-k2", K2_DECODE, "decode-mha-64"),
        "            exp_logic = tl.exp(tlogic - n_e_max)\n",
        "            exp_logic = tl.exp2(tlogic - n_e_max)\n",
    ),
    _numbers(
        "int4 mixture without the router's weights",
        *("sglang-k2", K2_MOE, "moe-int4-w4a16-6"),
        "        accumulator = accumulator * moe_weight[:, None]\n",
        "        accumulator = accumulator * 1.0\n",
    ),
    _numbers(
        "one number past a row's end",
        *("sglang-k2", K2_MOE, "moe-bf16-6"),
        "            b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k_start, other=0.0)\n",
        "            b = tl.load(b_ptrs, mask=offs_k[:, None] <= K - k_start, other=0.0)\n",
        "",
    ),
    _numbers(
        "zero points from the wrong half of a byte",
        *("sglang-k2", K2_MOE, "moe-int4-w4a16-zeros-6"),
        "        b_zp_shifter = (offs_bn[None, :] % 2) * 4\n",
        "        b_zp_shifter = (1 - offs_bn[None, :] % 2) * 4\n",
    ),
    _numbers(
        "bias of the first expert for all",
        *("sglang-k2", K2_MOE, "moe-bf16-bias-6"),
        "            bias_ptr + off_experts * stride_bias_e + offs_bn[None, :] * stride_bias_n\n",
        "            bias_ptr + offs_bn[None, :] * stride_bias_n\n",
    ),
    _numbers(
        "custom mask over the prefix ignored",
        *("sglang-k2", EXTEND, "extend-gqa-mask-prefix-128"),
        "            final_mask &= custom_mask\n        if SLIDING_WINDOW_SIZE > 0:\n"
        "            # Add mask where q_id <= kv_id + sliding_window_size\n            # q_id",
        "        if SLIDING_WINDOW_SIZE > 0:\n"
        "            # Add mask where q_id <= kv_id + sliding_window_size\n            # q_id",
    ),
    _numbers(
        "segments put together without their maxima (vllm)",
        *("vllm", VLLM_UNIFIED, "unified-gqa-segments-96"),
        "    segm_output *= tl.exp(segm_max - overall_max)[:, None]\n",
        "    segm_output *= 1.0\n",
    ),
    _numbers(
        "last segment forgotten (vllm)",
        *("vllm", VLLM_UNIFIED, "unified-gqa-segments-96"),
        "        [NUM_SEGMENTS_PER_SEQ], act_num_segments, dtype=tl.int32\n",
        "        [NUM_SEGMENTS_PER_SEQ], act_num_segments - 1, dtype=tl.int32\n",
        "",
    ),
    _numbers(
        "softcap ignored (vllm)",
        *("vllm", VLLM_UNIFIED, "unified-gqa-cap-80"),
        "            S = apply_softcap(S, softcap)\n",
        "            S = S * 1.0\n",
    ),
    _numbers(
        "window of a prefix one token wider (vllm)",
        *("vllm", VLLM_PREFIX, "prefix-prefill-window"),
        "                < SLIDING_WINDOW,\n",
        "                <= SLIDING_WINDOW,\n",
    ),
    _numbers(
        "bias taken off (vllm)",
        *("vllm", VLLM_MOE, "moe-bf16-bias-6", "        accumulator += bias[None, :]\n"),
        "        accumulator -= bias[None, :]\n",
    ),
    _numbers(
        "logit cap ignored (vllm)",
        *("vllm", DECODE, "decode-gqa-cap-80"),
        "                qk += tl.dot(qpe, kpe.to(qpe.dtype))\n            qk *= sm_scale\n\n"
        "            if logit_cap > 0:\n",
        "                qk += tl.dot(qpe, kpe.to(qpe.dtype))\n            qk *= sm_scale\n\n"
        "            if logit_cap > 1e9:\n",
    ),
    _numbers(
        "sinks weigh twice (vllm)",
        *("vllm", VLLM_PREFIX, "prefix-prefill-window", "        m_i = tl.load(\n"),
        "        m_i = 0.6931471805599453 + tl.load(\n",
    ),
]
