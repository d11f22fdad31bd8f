"""The kernels that routes call, written plainly with torch: what each argument means, by its docs.

Scales of NVFP4 are found by the formula of the PTX ISA, not by the program's own reordering.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.serving.products.compute import E2M1, E4M3

BLOCK, GROUP = 128, 16


def places(rows: int, columns: int, width: int) -> Any:
    """Where the scale of each row and column lies: tiles of 128 x 4 in 512 bytes."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    tile = (r // 128) * (width // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4


def fp4_values(packed: Any, scales: Any) -> Any:
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    columns = halves.shape[1] // GROUP
    flat = scales.view(torch.uint8).reshape(-1)
    own = torch.from_numpy(E4M3)[flat[places(len(packed), columns, scales.shape[1])].long()]
    return torch.from_numpy(E2M1)[halves.long()] * own.repeat_interleave(GROUP, 1)


def fp4_mm(a: Any, b: Any, left: Any, right: Any, alpha: Any, dtype: Any) -> Any:
    product = fp4_values(a, left) @ fp4_values(b, right).t()
    return (product * alpha.double()).to(dtype)


def flashinfer_fp4_mm(
    a: Any, b: Any, left: Any, right: Any, alpha: Any, dtype: Any, *, backend: str
) -> Any:
    return fp4_mm(a, b.t(), left, right.t(), alpha, dtype)


def fp4_experts(
    out: Any, a: Any, b: Any, left: Any, right: Any, alphas: Any, sizes: Any, rows: Any, tiles: Any
) -> None:
    for expert, (m, n, k) in enumerate(sizes.tolist()):
        assert b[expert].shape == (n, k // 2)
        row, tile = int(rows[expert]), int(tiles[expert])
        own = left[tile : tile + -(-m // 128) * 128]
        if m:
            out[row : row + m] = fp4_mm(
                a[row : row + m], b[expert], own, right[expert], alphas[expert], out.dtype
            )


def sgl_experts(
    a: Any, b: Any, left: Any, right: Any, alphas: Any, dtype: Any, device: str, params: Any
) -> Any:
    assert params["ab_strides"].tolist() == [2 * b.shape[2]] * len(b)
    assert params["c_strides"].tolist() == [b.shape[1]] * len(b)
    out = torch.empty(len(a), b.shape[1], dtype=dtype)
    names = ("problem_sizes", "expert_offsets", "blockscale_offsets")
    fp4_experts(out, a, b, left, right, alphas, *(params[name] for name in names))
    return out


def scaled_mm(a: Any, b: Any, left: Any, right: Any, dtype: Any) -> Any:
    """One scale, one for each row, or one for each block; `b` and its scales lie across."""
    assert b.stride(0) == 1, "columns are contiguous"
    if left.dim() == 2 and left.shape[1] > 1:
        assert left.stride(0) == 1 or len(left) == 1, "scales lie column by column"
        return block_mm(a, b.t(), left, right.t(), [BLOCK, BLOCK], dtype)
    return (a.double() * left.reshape(-1, 1) @ (b.double() * right.reshape(1, -1))).to(dtype)


def block_mm(a: Any, b: Any, left: Any, right: Any, block: list[int], dtype: Any) -> Any:
    wide = left.double().repeat_interleave(block[1], 1)[:, : a.shape[1]]
    tall = right.double().repeat_interleave(block[0], 0)[: b.shape[0]]
    tall = tall.repeat_interleave(block[1], 1)[:, : b.shape[1]]
    return ((a.double() * wide) @ (b.double() * tall).t()).to(dtype)


def bmm_fp8(a: Any, b: Any, left: Any, right: Any, dtype: Any, *, backend: str) -> Any:
    return scaled_mm(a[0], b[0], left, right, dtype)[None]


def fp4_quantise(
    x: Any,
    whole: Any,
    is_sf_swizzled_layout: bool = True,
    backend: str = "",
    padded_n: int | None = None,
    padding: int = 0,
) -> tuple[Any, Any]:
    """A scale for each 16 numbers so that the largest becomes 6; what is padded has `padding`."""
    assert is_sf_swizzled_layout
    rows, columns = x.shape[0], padded_n or x.shape[1]
    groups = torch.nn.functional.pad(x.double(), (0, columns - x.shape[1])).view(rows, -1, GROUP)
    scales = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    scaled = (groups * whole / scales.double()[..., None]).nan_to_num().view(rows, columns)
    codes = (scaled.abs()[..., None] - torch.from_numpy(E2M1[:8])).abs().argmin(-1)
    codes = (codes | (scaled < 0).long() * 8).to(torch.uint8)
    bits = scales.view(torch.uint8)
    bits[:, x.shape[1] // GROUP :] = padding
    width = -(-bits.shape[1] // 4) * 4
    flat = torch.full((-(-rows // 128) * 128 * width,), padding, dtype=torch.uint8)
    flat[places(rows, bits.shape[1], width)] = bits
    return codes[:, ::2] | codes[:, 1::2] << 4, flat.view(-1, width).view(torch.float8_e4m3fn)
