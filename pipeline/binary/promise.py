"""Whether GPU code is exactly what a build promised."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pipeline.binary.fatbin import CUBIN
from pipeline.binary.modules import Module


def broken_promise(modules: Iterable[Module], promised: Collection[str]) -> str:
    """What is there instead of machine code for exactly these; empty where it is that.

    PTX is neither asked for nor in the way, but no answer where machine code was promised.
    """
    want = ", ".join(sorted(promised)) or "no GPU code"
    for module in modules:
        have = sorted({str(target) for target in module if target.kind == CUBIN})
        if have != sorted(promised) or not promised:
            shown = ", ".join(have or sorted(map(str, module))) or "an empty module"
            return f"holds {shown} where exactly {want} was promised"
    return ""
