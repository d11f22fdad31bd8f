"""Triton's launches, watched: what each kernel became, and other launch parameters on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Json = dict[str, Any]


@contextmanager
def watched(override: Json) -> Iterator[dict[str, Json]]:
    """Kernels launched within, by name; `override` replaces keyword arguments of every launch
    of the kernel it names (`{"kernel": …, "num_stages": 1}`)."""
    from triton.runtime.jit import JITFunction

    real, found = JITFunction.run, {}

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        name = function.fn.__name__
        if override.get("kernel") == name:
            kwargs.update({k: v for k, v in override.items() if k != "kernel"})
        compiled = real(function, *args, **kwargs)
        if name not in found and compiled is not None:
            found[name] = _told(compiled)
        return compiled

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = real


def _told(compiled: Any) -> Json:
    metadata = compiled.metadata
    return {
        "shared_bytes": metadata.shared,
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "registers": compiled.n_regs,
        # the loader counts words of local memory, four bytes each
        "spill_bytes": None if compiled.n_spills is None else compiled.n_spills * 4,
        "target": str(getattr(metadata, "target", "")),
    }
