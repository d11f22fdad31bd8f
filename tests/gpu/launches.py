"""Triton's launches, watched: what each kernel became, and other launch parameters on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Json = dict[str, Any]
# Shared memory of a multiprocessor, and what each block takes of it beyond its own.
SM120_BYTES, HOPPER_BYTES, HOPPER_BLOCK_BYTES, RESERVED_BYTES = 102400, 233472, 232448, 1024


@contextmanager
def watched(override: Json) -> Iterator[dict[str, Json]]:
    """Kernels launched within, by name; `override` replaces keyword arguments of every launch
    of the kernel it names (`{"kernel": …, "num_stages": 1}`)."""
    from triton.runtime.jit import JITFunction

    real, result = JITFunction.run, {}

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        name = function.fn.__name__
        if override.get("kernel") == name:
            kwargs.update({k: v for k, v in override.items() if k != "kernel"})
        compiled = real(function, *args, **kwargs)
        if name not in result and compiled is not None:
            result[name] = _told(compiled)
        return compiled

    JITFunction.run = run
    try:
        yield result
    finally:
        JITFunction.run = real


def padded(shared_bytes: int) -> int:
    """So much shared memory that a Hopper multiprocessor holds no more blocks than SM120's would.

    What SM120 could not hold at all keeps its own size.
    """
    blocks = SM120_BYTES // (shared_bytes + RESERVED_BYTES)
    if not blocks:
        return shared_bytes
    room = HOPPER_BYTES // blocks - RESERVED_BYTES
    return max(shared_bytes, min(room, HOPPER_BLOCK_BYTES) // 128 * 128)


def pad_launches() -> None:
    """From now on kernels are loaded and launched with `padded` shared memory."""
    from triton.compiler.compiler import CompiledKernel, make_backend

    real = CompiledKernel._init_handles

    def init(kernel: Any) -> None:
        if kernel.module is None and not hasattr(kernel, "own_shared"):
            kernel.own_shared = kernel.metadata.shared
            kernel.metadata = kernel.metadata._replace(shared=padded(kernel.own_shared))
            backend = make_backend(kernel.metadata.target)
            kernel.packed_metadata = backend.pack_metadata(kernel.metadata)
        real(kernel)

    CompiledKernel._init_handles = init


def _told(compiled: Any) -> Json:
    metadata = compiled.metadata
    return {
        "shared_bytes": getattr(compiled, "own_shared", metadata.shared),
        "launched_bytes": metadata.shared,
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "registers": compiled.n_regs,
        # the loader counts words of local memory, four bytes each
        "spill_bytes": None if compiled.n_spills is None else compiled.n_spills * 4,
        "target": str(getattr(metadata, "target", "")),
        "matrix": _matrix_instructions(compiled.asm.get("ptx", "")),
    }


def _matrix_instructions(ptx: str) -> list[str]:
    """SM120 has mma.sync only; a comparison in which one side has wgmma says little of it."""
    return [word for word in ("wgmma.mma_async", "mma.sync") if word in ptx]
