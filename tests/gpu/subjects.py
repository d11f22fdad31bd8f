"""What is measured: three kernels, the inputs they get, and what they should compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.images.gate.worker.attention import Expected, Keys, attend, causal, picked, rounded
from tests.gpu.engine import PLATFORM, load

SM120, THIS_CARD = (12, 0), None
SEED = 20260101


@dataclass(frozen=True)
class Variant:
    """One way to launch a kernel."""

    name: str
    form: str  # which of the engine's two files
    capability: tuple[int, int] | None  # what the file is told the card is; none: the truth
    blocks: tuple[int, int, int] | None = None  # BLOCK_M, BLOCK_N, warps
    override: dict[str, Any] = field(default_factory=dict)
    is_candidate: bool = False  # somebody's choice, or only one that might be better


@dataclass(frozen=True)
class Shape:
    """One set of inputs."""

    name: str
    sizes: dict[str, int]
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Subject:
    """A kernel, its shapes and variants; the first variant is what the others are compared with."""

    name: str
    image: str
    shapes: list[Shape]
    variants: list[Variant]
    make: Callable[[Shape, Any], dict[str, Any]]
    call: Callable[[Any, dict[str, Any]], None]
    expect: Callable[[dict[str, Any]], Expected]
    output: str
    tolerance: dict[str, float]

    def pairs(self, candidates: bool) -> Iterator[tuple[Shape, list[Variant]]]:
        for shape in self.shapes:
            yield shape, [v for v in self.variants if candidates or not v.is_candidate]

    def module(self, folder: Path, variant: Variant) -> Any:
        """The engine's file, told which card it is on and which blocks to take."""
        module = load(folder, self.image, variant.form)
        if variant.capability and hasattr(module, "CUDA_CAPABILITY"):
            module.CUDA_CAPABILITY = variant.capability
        PLATFORM.family = variant.capability[0] * 10 if variant.capability else 90
        if variant.blocks:
            rows, columns, warps = variant.blocks
            own = module._get_block_sizes_for_extend_attention
            module._get_block_sizes_for_extend_attention = lambda q, v: (
                *own(q, v)[:3],
                rows,
                columns,
                warps,
            )
        return module


# Each probability is rounded to the values' type and the result to its own, half a unit in the last
# place each: together one unit, 2^-7 in bf16, of the sum of magnitudes. vLLM brings an fp8 cache to
# bf16 first. fp32 inputs are multiplied as tf32 on the card, whose 11 bits also blur the scores.
# SGLang multiplies shares of an fp8 cache in fp8, whose rounding is 2^-4 of each.
FP8_SHARES = 2.0**-4
TOLERANCE = {"bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-7, "float32": 2.0**-7}


def _random(shape: tuple[int, ...], device: Any, dtype: Any) -> Any:
    import torch

    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def make_extend(shape: Shape, device: Any) -> dict[str, Any]:
    """Prefill as SGLang does it, its cached prefix scattered; in MLA V is a view of the one K."""
    import torch

    torch.manual_seed(SEED)
    s, kind = shape.sizes, torch.bfloat16
    new, prefix, heads, wide = s["new"], s["prefix"], s["heads"], s["value"]
    pool = prefix + 64
    place = torch.randperm(pool, device=device)[:prefix]
    k_buffer = _random((pool, s["keys"], s["head"]), device, getattr(torch, shape.dtype))
    k_extend = _random((new, s["keys"], s["head"]), device, kind)
    is_latent = s["keys"] == 1
    return {
        "q_extend": _random((new, heads, s["head"]), device, kind),
        "k_extend": k_extend,
        "v_extend": k_extend[..., :wide]
        if is_latent
        else _random((new, s["keys"], wide), device, kind),
        "o_extend": torch.full((new, heads, wide), float("nan"), device=device, dtype=kind),
        "k_buffer": k_buffer,
        "v_buffer": k_buffer[..., :wide]
        if is_latent
        else _random((pool, s["keys"], wide), device, k_buffer.dtype),
        "qo_indptr": torch.tensor([0, new], device=device, dtype=torch.int32),
        "kv_indptr": torch.tensor([0, prefix], device=device, dtype=torch.int32),
        "kv_indices": place.to(torch.int64),
        "custom_mask": _mask(new, prefix, device) if s["mask"] else None,
        "is_causal": True,
        "mask_indptr": torch.tensor([0, new * (new + prefix)], device=device)
        if s["mask"]
        else None,
        "max_len_extend": new,
        "sm_scale": s["head"] ** -0.5,
    }


def _mask(new: int, prefix: int, device: Any) -> Any:
    """Which keys a query sees, as speculative decoding says it: here simply the causal ones."""
    import torch

    own = causal(new, new, device)
    return torch.cat([torch.ones((new, prefix), device=device, dtype=torch.bool), own], 1).flatten()


def expect_extend(a: dict[str, Any]) -> Expected:
    q, new = a["q_extend"], a["q_extend"].shape[0]
    place = a["kv_indices"]
    own = Keys(q, a["k_extend"], a["v_extend"], causal(new, new, q.device))
    # SGLang multiplies in the cache's type
    cached = Keys(
        rounded(q, a["k_buffer"].dtype),
        picked(a["k_buffer"], place),
        picked(a["v_buffer"], place),
    )
    return attend([cached, own] if len(place) else [own], a["sm_scale"])


def make_decode(shape: Shape, device: Any) -> dict[str, Any]:
    """MLA decode as vLLM does it: pages of the latent cache in any order, V a view of K."""
    import torch

    torch.manual_seed(SEED)
    s, kind = shape.sizes, getattr(torch, shape.dtype)
    batch, length, heads, page, splits = (
        s[n] for n in ("batch", "length", "heads", "page", "splits")
    )
    pages = (length + page - 1) // page
    cache = _random((batch * pages + 8, page, 1, 576), device, kind)
    order = torch.randperm(batch * pages, device=device).to(torch.int32) + 8
    lengths = torch.full((batch,), length, device=device, dtype=torch.int32)
    if batch > 1:
        lengths[1] = length - 13
    return {
        "q": _random((batch, heads, 576), device, torch.bfloat16),
        "k_buffer": cache,
        "v_buffer": cache[..., :512],
        "o": torch.full((batch, heads, 512), float("nan"), device=device, dtype=torch.bfloat16),
        "lse": torch.zeros((batch, heads), device=device),
        "req_to_token": order.reshape(batch, pages).contiguous(),
        "b_seq_len": lengths,
        "attn_logits": torch.zeros((batch, heads, splits, 513), device=device),
        "num_kv_splits": splits,
        "sm_scale": 192**-0.5,
        "page_size": page,
        "k_scale": torch.tensor(0.5, device=device),
        "v_scale": torch.tensor(0.5, device=device),
        "is_mla": True,
    }


def expect_decode(a: dict[str, Any]) -> Expected:
    import torch

    result = []
    for row in range(a["q"].shape[0]):
        length = int(a["b_seq_len"][row])
        latent = picked(a["k_buffer"], a["req_to_token"][row]).flatten(0, 1)[:length]
        if latent.dtype == torch.float8_e4m3fn:
            # the cache is brought to the queries' type before it is multiplied
            latent = rounded(latent.float() * a["k_scale"], torch.bfloat16)
        result.append(
            attend([Keys(a["q"][row : row + 1], latent, latent[..., :512])], a["sm_scale"])
        )
    return Expected(torch.cat([f.want for f in result]), torch.cat([f.size for f in result]))


def make_prefill(shape: Shape, device: Any) -> dict[str, Any]:
    """A vision tower's attention: two images of different size, every patch sees every patch."""
    import torch

    torch.manual_seed(SEED)
    s, kind = shape.sizes, getattr(torch, shape.dtype)
    tokens, heads, head = s["tokens"], s["heads"], s["head"]
    first = tokens // 2 + 5
    size = (tokens, heads, head)
    return {
        "q": _random(size, device, kind),
        "k": _random(size, device, kind),
        "v": _random(size, device, kind),
        "o": torch.full(size, float("nan"), device=device, dtype=kind),
        "b_start_loc": torch.tensor([0, first], device=device, dtype=torch.int32),
        "b_seq_len": torch.tensor([first, tokens - first], device=device, dtype=torch.int32),
        "max_input_len": max(first, tokens - first),
        "is_causal": False,
    }


def expect_prefill(a: dict[str, Any]) -> Expected:
    import torch

    result = []
    for start, length in zip(a["b_start_loc"].tolist(), a["b_seq_len"].tolist(), strict=True):
        rows = slice(start, start + length)
        result.append(
            attend([Keys(a["q"][rows], a["k"][rows], a["v"][rows])], a["q"].shape[-1] ** -0.5)
        )
    return Expected(torch.cat([f.want for f in result]), torch.cat([f.size for f in result]))


def extend_variants(tried: Sequence[tuple[int, int, int, int]]) -> list[Variant]:
    """Hopper's blocks, the patch's, and what might be better under SM120's limit."""
    return [
        Variant("published", "published", THIS_CARD),
        Variant("patched for SM120", "patched", SM120),
        Variant("sglang PR 17908", "pr-17908", SM120),
        *(
            Variant(
                f"{m}x{n}, {warps} warps, {stages} stages",
                "patched",
                SM120,
                (m, n, warps),
                {"kernel": "_fwd_kernel", "num_stages": stages},
                is_candidate=True,
            )
            for m, n, warps, stages in tried
        ),
    ]


def extend_shapes(heads: dict[str, int]) -> list[Shape]:
    """Short and long prompts, with and without a cached prefix, an fp8 cache, a mask."""
    plain = [(2048, 0), (2048, 8192), (8192, 0), (8192, 8192)]
    return [
        *(Shape(f"{n} after {p}", {**heads, "new": n, "prefix": p, "mask": 0}) for n, p in plain),
        Shape(
            "2048 after 8192 in fp8",
            {**heads, "new": 2048, "prefix": 8192, "mask": 0},
            "float8_e4m3fn",
        ),
        Shape("2048 after 2048 masked", {**heads, "new": 2048, "prefix": 2048, "mask": 1}),
    ]


def decode_variants() -> list[Variant]:
    stage = "_fwd_grouped_kernel_stage1"
    tried = [(n, w, st) for n in (16, 32, 64) for w in (4, 8) for st in (1, 2)]
    return [
        Variant("published (2 stages)", "published", THIS_CARD),
        Variant("patched for SM120", "patched", SM120),
        *(
            Variant(
                f"BLOCK_N {n}, {warps} warps, {stages} stages",
                "published",
                THIS_CARD,
                None,
                {"kernel": stage, "BLOCK_N": n, "num_warps": warps, "num_stages": stages},
                is_candidate=True,
            )
            for n, warps, stages in tried
        ),
    ]


def subjects() -> list[Subject]:
    """Everything that is measured on a card."""
    latent = [(32, 32, 8, 1), (32, 32, 4, 1), (16, 64, 8, 1), (16, 64, 16, 1), (32, 32, 16, 1)]
    wide = [(128, 64, 8, 1), (64, 64, 8, 1), (64, 64, 4, 1), (64, 128, 8, 1), (32, 64, 8, 1)]
    kinds = {
        "MLA 576/512": ({"head": 576, "value": 512, "heads": 8, "keys": 1}, latent),
        "MLA 192/128": ({"head": 192, "value": 128, "heads": 8, "keys": 8}, wide),
        "GQA 64": ({"head": 64, "value": 64, "heads": 8, "keys": 2}, wide),
        "GQA 128": ({"head": 128, "value": 128, "heads": 8, "keys": 2}, wide),
        "GQA 256": (
            {"head": 256, "value": 256, "heads": 8, "keys": 2},
            [(64, 64, 8, 1), (64, 64, 4, 1), (32, 64, 8, 1), (32, 64, 4, 1), (64, 32, 8, 1)],
        ),
    }
    return [
        *(
            Subject(
                f"sglang-k2 extend attention, {name}",
                "sglang-k2",
                extend_shapes(heads),
                extend_variants(tried),
                make_extend,
                lambda module, a: module.extend_attention_fwd(**a),
                expect_extend,
                "o_extend",
                {**TOLERANCE, "float8_e4m3fn": FP8_SHARES},
            )
            for name, (heads, tried) in kinds.items()
        ),
        Subject(
            "vllm MLA decode 576/512",
            "vllm",
            [
                Shape(
                    f"{kind} batch {batch} x 8192",
                    {"batch": batch, "length": 8192, "heads": 16, "page": 64, "splits": 16},
                    kind,
                )
                for kind in ("float8_e4m3fn", "bfloat16")
                for batch in (1, 8, 64)
            ],
            decode_variants(),
            make_decode,
            lambda module, a: module.decode_attention_fwd(**a),
            expect_decode,
            "o",
            TOLERANCE,
        ),
        Subject(
            "sglang prefill attention",
            "sglang",
            [
                Shape(
                    f"{kind} head {head} x {tokens}",
                    {"tokens": tokens, "heads": 16, "head": head},
                    kind,
                )
                for kind, head in (
                    ("bfloat16", 64),
                    ("bfloat16", 72),
                    ("bfloat16", 80),
                    ("bfloat16", 128),
                    ("bfloat16", 256),
                    ("float32", 128),
                )
                for tokens in (2048, 8192)
            ],
            [
                Variant("published (128x128)", "published", THIS_CARD),
                Variant("patched for SM120", "patched", SM120),
            ],
            make_prefill,
            lambda module, a: module.context_attention_fwd(**a),
            expect_prefill,
            "o",
            TOLERANCE,
        ),
    ]
