"""Operators that an engine has only in CUDA, by their definition, on the CPU.

A kernel's inputs go through them before it is launched. For its size any bytes would do; for its
numbers they must be the right ones. Dynamic quantization to 8 bits: the largest magnitude of a
group becomes the largest number of the type.
"""

from __future__ import annotations

import sys
from typing import Any

from .errors import Stopped

# A group of nothing but zeros must not be divided by zero.
_SMALLEST_SCALE = 1e-12


def per_tensor_quant_fp8(
    input: Any,
    output_q: Any,
    output_s: Any,
    is_static: bool = False,
) -> None:
    """One scale for all; a static one is given."""
    if not is_static:
        largest = input.float().abs().max() / _bounds(output_q)[1]
        output_s.fill_(float(largest.clamp_min(_SMALLEST_SCALE)))
    _quantize(input.float(), output_s.float().reshape(1), output_q)


def per_token_quant_fp8(input: Any, output_q: Any, output_s: Any) -> None:
    """One scale for each row."""
    scale = input.float().abs().amax(-1, keepdim=True) / _bounds(output_q)[1]
    output_s.copy_(scale.clamp_min(_SMALLEST_SCALE).reshape(output_s.shape))
    _quantize(input.float(), output_s.reshape(scale.shape), output_q)


def per_token_group_quant_8bit(
    input: Any,
    output_q: Any,
    output_s: Any,
    group_size: int,
    eps: float,
    smallest: float,
    largest: float,
    *how: Any,
    **more: Any,
) -> None:
    """One scale for each group of a row's numbers."""
    # column-major and UE8M0 scales and the like, which no case asks for
    if any(how) or any(more.values()):
        raise Stopped("only plain quantization by groups is implemented here")
    groups = input.float().reshape(*input.shape[:-1], -1, group_size)
    scale = groups.abs().amax(-1).clamp_min(eps) / largest
    output_s.copy_(scale)
    wide = output_s.repeat_interleave(group_size, -1)
    _quantize(input.float(), wide, output_q)


def _bounds(tensor: Any) -> tuple[float, float]:
    """The smallest and the largest number of a tensor's type: e4m3, e5m2 or int8."""
    import torch

    kind = tensor.dtype
    limits = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    return float(limits.min), float(limits.max)


def _quantize(values: Any, scale: Any, into: Any) -> None:
    into.copy_((values / scale).clamp(*_bounds(into)).to(into.dtype))


_OPERATORS = {
    "sgl_per_tensor_quant_fp8": per_tensor_quant_fp8,
    "sgl_per_token_quant_fp8": per_token_quant_fp8,
    "sgl_per_token_group_quant_8bit": per_token_group_quant_8bit,
}
# Where sglang 0.5.8 and 0.5.23 keep the functions that call them.
_PLACES = (
    "sglang.srt.layers.quantization.fp8_kernel",
    "sglang.kernels.ops.quantization.fp8_kernel",
)


def define_operators() -> None:
    """Put the definitions where the engine's modules have taken the operators to."""
    for place in _PLACES:
        module = sys.modules.get(place)
        for name, function in _OPERATORS.items():
            if module is not None and hasattr(module, name):
                setattr(module, name, function)
