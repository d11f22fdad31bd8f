"""How an engine split each card's memory, read from the log of its start."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from pipeline.serving.report.model import Memory

# Workers name themselves in each line: `[… TP3]` in SGLang, `(Worker_TP3 pid=…)` in vLLM.
_RANK = re.compile(r"TP(\d+)")
_CUDA = re.compile(r"CUDA(\d+)")


class _Sign(NamedTuple):
    """A line of an engine; its groups are added up."""

    field: str
    pattern: re.Pattern[str]
    scale: float = 1.0  # to GiB
    adds: bool = False


def _sign(field: str, pattern: str, scale: float = 1.0, adds: bool = False) -> _Sign:
    return _Sign(field, re.compile(pattern), scale, adds)


_MIB = 1 / 1024
# SGLang divides by 1 << 30 and writes GB.
_SIGNS = (
    _sign("weights", r"Load weight end\..*\bmem usage=([\d.]+) GB"),
    _sign("kv", r"KV Cache is allocated\..*\bKV size: ([\d.]+) GB"),
    _sign("kv", r"KV Cache is allocated\..*\bK size: ([\d.]+) GB, V size: ([\d.]+) GB"),
    _sign("kv_tokens", r"KV Cache is allocated\..*#tokens: ([\d,]+)"),
    _sign("free", r"Memory pool end\. avail mem=([\d.]+) GB"),
    _sign("free", r"\bavailable_gpu_mem=([\d.]+) GB"),
    _sign("weights", r"Model loading took ([\d.]+) GiB"),
    _sign("kv", r"Available KV cache memory: ([\d.]+) GiB"),
    _sign("kv_tokens", r"GPU KV cache size: ([\d,]+) tokens"),
    # llama.cpp writes a line for each card, and one more for each draft model; ik_llama.cpp
    # leaves `model` out
    _sign("weights", r"CUDA\d+ (?:model )?buffer size = +([\d.]+) MiB", _MIB, adds=True),
    _sign("kv", r"CUDA\d+ KV buffer size = +([\d.]+) MiB", _MIB, adds=True),
)


def memory_of_log(lines: Iterable[str], total_gib: float | None = None) -> list[Memory]:
    """One entry for each card whose weights the log names; empty where it names none."""
    cards: dict[int, dict[str, float]] = defaultdict(dict)
    tokens: int | None = None
    for line in lines:
        for sign in _SIGNS:
            match = sign.pattern.search(line)
            if match is None:
                continue
            amount = sum(float(group.replace(",", "")) for group in match.groups()) * sign.scale
            if sign.field == "kv_tokens":
                tokens = round(amount)
                continue
            rank = _CUDA.search(line) or _RANK.search(line)
            card = cards[int(rank[1]) if rank else 0]
            card[sign.field] = amount + (card.get(sign.field, 0.0) if sign.adds else 0.0)
    about = {"unit": "GiB", "total": total_gib, "kv_tokens": tokens, "source": "the engine's log"}
    found = []
    for index, values in sorted(cards.items()):
        if "weights" in values:
            rounded = {name: round(value, 3) for name, value in values.items()}
            found.append(Memory.model_validate({**rounded, "name": f"GPU {index}", **about}))
    return found
