"""The program that runs on a card, with kernels of numpy in place of the card's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pipeline.serving.products.compute import (
    E2M1,
    E4M3,
    Array,
    Operand,
    make_operand,
    measure_runs,
    pack,
    swizzle,
)
from pipeline.serving.products.model import Bound, Measured, judge

FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block", "nvfp4")
M, N, K = 48, 320, 512
Kernel = Callable[[Operand, Operand], Array]


def operands(kind: str) -> tuple[Operand, Operand]:
    rng = np.random.default_rng(7)
    return (
        make_operand(rng, kind, M, K, weight=False),
        make_operand(rng, kind, N, K, weight=True),
    )


def bf16(values: Array) -> Array:
    """Rounded to bfloat16, ties to even, as a kernel stores its result."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000).view(np.float32).astype(np.float64)


def sound(left: Operand, right: Operand) -> Array:
    """Sums in float32."""
    return bf16(left.values.astype(np.float32) @ right.values.astype(np.float32).T)


def judged(kind: str, kernel: Kernel, runs: int = 10) -> tuple[str, str]:
    left, right = operands(kind)
    exact = left.values @ right.values.T, np.abs(left.values) @ np.abs(right.values).T
    results = [kernel(left, right) for _ in range(runs)]
    found = measure_runs(results, *exact, Bound().model_dump())
    about = {"product": "p", "format": kind, "route": "r", "tokens": M, "outcome": "computed"}
    return judge(Measured.model_validate({**about, **found}))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_sound_kernel_passes(kind: str) -> None:
    assert judged(kind, sound)[0] == "passed"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_kernel_that_adds_with_fourteen_bits_passes(kind: str) -> None:
    def coarse(left: Operand, right: Operand) -> Array:
        total = np.zeros((M, N))
        for i in range(0, K, 32):
            total += left.values[:, i : i + 32] @ right.values[:, i : i + 32].T
            mantissa, exponent = np.frexp(total)
            total = np.ldexp(np.trunc(mantissa * 2**14) / 2**14, exponent)
        return bf16(total)

    assert judged(kind, coarse)[0] == "passed"


def with_nan(left: Operand, right: Operand) -> Array:
    out = sound(left, right)
    out[3, 5] = np.nan
    return out


def with_infinity(left: Operand, right: Operand) -> Array:
    out = sound(left, right)
    out[0, 0] = np.inf
    return out


def with_a_wrong_tile(left: Operand, right: Operand) -> Array:
    out = sound(left, right)
    out[16:32, 128:256] = out[16:32, :128].copy()
    return out


def without_the_last_group(left: Operand, right: Operand) -> Array:
    return bf16(left.values[:, :-16] @ right.values[:, :-16].T)


def with_swapped_scales(left: Operand, right: Operand) -> Array:
    """Each block of 128 columns of the weights with the scale of its neighbour."""
    values = right.values.reshape(N, K // 128, 128)
    scale = np.abs(values).max(axis=2, keepdims=True)
    swapped = values / scale * scale[:, ::-1]
    return bf16(left.values @ swapped.reshape(N, K).T)


def with_scales_of_other_rows(left: Operand, right: Operand) -> Array:
    scale = np.abs(right.values).max(axis=1, keepdims=True)
    return bf16(left.values @ (right.values / scale * np.roll(scale, 1, axis=0)).T)


def with_zero_rows(left: Operand, right: Operand) -> Array:
    out = sound(left, right)
    out[40:] = 0
    return out


def without_the_scale_of_the_whole(left: Operand, right: Operand) -> Array:
    return sound(left, right) * 32


@pytest.mark.parametrize(
    ("kind", "kernel", "said"),
    [
        *((kind, with_nan, "1 of 15,360 values are NaN") for kind in FORMATS),
        *((kind, with_infinity, "infinite") for kind in FORMATS),
        *((kind, with_a_wrong_tile, "rows 16-31 and columns 128-255") for kind in FORMATS),
        *((kind, without_the_last_group, "wrong") for kind in FORMATS),
        *((kind, with_zero_rows, "rows of zeros: 8") for kind in FORMATS),
        *((kind, without_the_scale_of_the_whole, "wrong") for kind in FORMATS),
        ("fp8-block", with_swapped_scales, "wrong"),
        ("nvfp4", with_swapped_scales, "wrong"),
        ("fp8-channel", with_scales_of_other_rows, "wrong"),
    ],
)
def test_a_broken_kernel_fails(kind: str, kernel: Kernel, said: str) -> None:
    verdict, message = judged(kind, kernel)
    assert verdict == "failed"
    assert said in message


def test_a_kernel_that_is_wrong_once_in_ten_runs_fails() -> None:
    calls = iter(range(10))

    def flaky(left: Operand, right: Operand) -> Array:
        return (with_a_wrong_tile if next(calls) == 6 else sound)(left, right)

    verdict, message = judged("nvfp4", flaky)
    assert verdict == "failed"
    assert "1 of 10 runs gave other bits" in message
    assert "columns 128-255" in message


def test_a_kernel_whose_last_bit_changes_fails_too() -> None:
    calls = iter(range(10))

    def racing(left: Operand, right: Operand) -> Array:
        out = sound(left, right)
        out[0, 0] *= 1 + 2.0**-8 * (next(calls) == 3)
        return out

    assert judged("fp8-block", racing) == ("failed", "1 of 10 runs gave other bits")


def test_bytes_of_fp8_and_fp4_mean_what_the_formats_say() -> None:
    assert [E4M3[code] for code in (0x00, 0x01, 0x38, 0x7E, 0xB8)] == [0, 2.0**-9, 1, 448, -1]
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all()
    assert E2M1[[1, 7, 9, 15]].tolist() == [0.5, 6, -0.5, -6]


@pytest.mark.parametrize("kind", FORMATS)
def test_operands_are_finite_and_the_same_every_time(kind: str) -> None:
    first, again = operands(kind), operands(kind)
    assert all(np.isfinite(each.values).all() for each in first)
    assert all((a.values == b.values).all() for a, b in zip(first, again, strict=True))


def test_activations_of_nvfp4_are_exact_in_bfloat16_and_have_their_largest_in_each_group() -> None:
    left = operands("nvfp4")[0]
    assert (bf16(left.values) == left.values).all()
    largest = np.abs(left.values).reshape(M, K // 16, 16).max(axis=2)
    assert (largest == 6 * E4M3[left.scales] / left.whole).all()


def test_the_largest_scale_is_among_those_of_nvfp4() -> None:
    assert all((E4M3[each.scales[-1]] == 448).all() for each in operands("nvfp4"))


def test_the_first_of_two_fp4_numbers_is_in_the_low_half() -> None:
    assert pack(np.array([[1, 2, 15, 0]], dtype=np.uint8)).tolist() == [[0x21, 0x0F]]


def test_scales_lie_in_tiles_of_128_rows_and_4_columns() -> None:
    """As in the PTX ISA: 32 rows of 16 bytes, each with four columns of rows 0, 32, 64 and 96."""
    scales = np.random.default_rng(1).integers(0, 256, (300, 10), dtype=np.uint8)
    flat = swizzle(scales).reshape(-1)
    assert flat.size == 384 * 12
    for row, column in ((0, 0), (1, 0), (32, 0), (97, 3), (128, 4), (299, 9)):
        tile = (row // 128) * 3 + column // 4
        place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
        assert flat[place] == scales[row, column]
    assert flat.sum() == scales.sum()


def test_columns_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole groups"):
        make_operand(np.random.default_rng(1), "nvfp4", 4, 24, weight=True)
