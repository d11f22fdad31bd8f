"""Triton's interpreter, with the few things repaired that would make right kernels look wrong.

It keeps bfloat16 and fp8 numbers as plain integers. Conversions cut bits off instead of rounding,
`tl.dot` and arithmetic on bfloat16 work on the integers themselves, and NumPy 2.4 refuses what
Triton 3.5 does with array scalars. What is repaired here does what the card does: arithmetic on
narrow floats happens in float32 and is rounded to nearest even.
"""

from __future__ import annotations

from typing import Any

from .errors import Json

REPAIRS = [
    "conversions between float types round to nearest even",
    "bfloat16 arithmetic, reductions and tl.dot are done in float32",
    "a tensor of one element is an index (NumPy 2.4)",
    "kernels run one after the other, so none waits for another",
    "quantization that an engine has only in CUDA is done by definition",
]


def install() -> None:
    """Repair the interpreter of this process."""
    from triton.runtime import interpreter

    interpreter._convert_float = converted
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _casting(builder.cast_impl, interpreter)
    builder.create_dot = _dot(interpreter)
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, _in_float32(getattr(builder, name), interpreter))
    builder.get_bf16 = lambda self, value: _narrowed(self.get_fp32(value), interpreter)
    reductions = interpreter.ReduceScanOpInterface
    reductions.apply = _reducing(reductions.apply)
    interpreter._patch_lang_tensor = _indexing(interpreter._patch_lang_tensor)
    _never_wait()


def _never_wait() -> None:
    from triton.language.extra import cuda

    # waits for the kernel before, which has ended when the interpreter begins the next
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, lambda **kwargs: None)


def converted(values: Any, before: Any, after: Any, rounding: Any) -> Any:
    """Numbers of one float type as another's, both as the integers the interpreter keeps."""
    import numpy as np
    import torch

    # no repair for it: an error is better than numbers that are slightly off
    if rounding is not None and getattr(rounding, "name", "") == "RTZ":
        raise NotImplementedError("rounding towards zero")
    kinds = _kinds()
    source, target = kinds[before.name], kinds[after.name]
    whole = np.dtype(f"int{before.primitive_bitwidth}")
    # a view as another type needs the bytes in one piece
    bits = torch.from_numpy(np.ascontiguousarray(values).view(whole))
    numbers = bits.view(source).to(torch.float64 if source is torch.float64 else torch.float32)
    if target.itemsize == 1:
        # the card's conversions to fp8 saturate (cvt.satfinite), torch's do not
        largest = torch.finfo(target).max
        finite = numbers.clamp(-largest, largest)
        numbers = torch.where(numbers.isfinite(), finite, numbers)
    width = after.primitive_bitwidth
    bits_after = numbers.to(target).view(getattr(torch, f"int{width}")).numpy()
    return bits_after.view(np.dtype(f"uint{width}")).reshape(np.shape(values))


def _kinds() -> Json:
    import torch

    return {
        **{"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16},
        **{"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2},
    }


def _is_bfloat16(handle: Any) -> bool:
    return getattr(getattr(handle, "dtype", None), "scalar", None) is not None and (
        handle.dtype.scalar.name == "bf16"
    )


def _widened(handle: Any, interpreter: Any) -> Any:
    """A handle in float32, where it is kept as integers."""
    import numpy as np

    kind = handle.dtype.scalar
    if kind.name not in ("bf16", "fp8e4nv", "fp8e5"):
        return handle
    data = converted(handle.data, kind, interpreter.tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(data, interpreter.tl.float32)


def _narrowed(handle: Any, interpreter: Any) -> Any:
    """A float32 result as bfloat16; truth values stay as they are."""
    import numpy as np

    # a comparison of two bfloat16 tensors
    if handle.data.dtype == np.bool_:
        return handle
    data = converted(
        handle.data.astype(np.float32), interpreter.tl.float32, interpreter.tl.bfloat16, None
    )
    return interpreter.TensorHandle(data, interpreter.tl.bfloat16)


def _in_float32(real: Any, interpreter: Any) -> Any:
    def operation(self: Any, *handles: Any) -> Any:
        *numbers, how = handles
        if not any(_is_bfloat16(n) for n in numbers):
            return real(self, *handles)
        wide = [_widened(n, interpreter) for n in numbers]
        return _narrowed(real(self, *wide, how), interpreter)

    return operation


def _casting(real: Any, interpreter: Any) -> Any:
    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        before, after = src.dtype.scalar, dst_type.scalar
        kinds = _kinds()
        if before.name in kinds and after.name in kinds:
            kept = interpreter._get_np_dtype(dst_type)
            data = converted(src.data, before, after, None).view(kept)
            return interpreter.TensorHandle(data, after)
        if after.name == "bf16":
            return _narrowed(real(self, src, interpreter.tl.float32), interpreter)
        if before.name == "bf16":
            return real(self, _widened(src, interpreter), dst_type)
        return real(self, src, dst_type)

    return cast


def _dot(interpreter: Any) -> Any:
    import numpy as np

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        left, right = (_widened(handle, interpreter).data for handle in (a, b))
        # tensor cores multiply narrow types and add up in the accumulator's
        product = np.matmul(left, right, dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    return create_dot


def _reducing(real: Any) -> Any:
    def apply(self: Any, given: Any) -> Any:
        import triton.language as tl

        several = given if isinstance(given, tuple) else (given,)
        if not any(getattr(x, "dtype", None) == tl.bfloat16 for x in several):
            return real(self, given)
        if len(several) > 1:
            raise NotImplementedError("a reduction of several bfloat16 tensors")
        return real(self, several[0].to(tl.float32)).to(tl.bfloat16)

    return apply


def _indexing(real: Any) -> Any:
    def patch(tensor: Any, *scope: Any) -> None:
        real(tensor, *scope)
        if not scope:
            # before Triton 3.6; later ones take the one element themselves
            tensor.__index__ = lambda self: int(self.handle.data.item())

    return patch
