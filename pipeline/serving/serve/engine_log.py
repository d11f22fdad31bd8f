"""What an engine's own log says of a start: how long its parts took, and which kernels it chose.

The lines are those of vLLM 0.32.0 and SGLang 0.5.8 to 0.5.23; an engine that words them otherwise
says nothing here, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import datetime
from itertools import islice
from pathlib import Path

from pipeline.core.files import bounded_lines
from pipeline.core.model import Engine, Frozen
from pipeline.core.yaml_file import read_yaml

# A log that fills the disk is read so far.
_MOST_LINES = 200_000


class MemoryLine(Frozen):
    """A line about a card's memory."""

    field: str
    pattern: str
    in_mib: bool = False
    adds: bool = False


class EngineLines(Frozen):
    """`engine_lines.yaml`: what engines write into their logs."""

    stages: dict[Engine, dict[str, str]]
    phases: dict[str, list[str]]
    memory: list[MemoryLine]


LINES = read_yaml(Path(__file__).with_name("engine_lines.yaml"), EngineLines)
_SECONDS = r"(\d+(?:\.\d+)?) ?s(?:ecs?|econds?)?\b"
_PATTERNS = [
    (name, re.compile(text.replace("{seconds}", _SECONDS)))
    for name, texts in LINES.phases.items()
    for text in texts
]
# FlashInfer only says when it begins and when it ends.
_TUNING = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?).*Autotuning process (\w+)")
_RANK = re.compile(r"\b(?:Worker_)?(?:DP\d+_)?(TP\d+)\b|\bpid=(\d+)")
_CHOICE = re.compile(
    r"\b(Using (?:the )?\S+(?: \S+){0,6}? (?:(?:MoE|attention)(?: backend)?|backend|kernel|GEMM)\b"
    r"|attention[_ ]backend ?[:=] ?\S+|Using \S+ for (?:\w+ )?(?:MoE|\w+ GEMM))"
)
MOST_CHOICES = 40


def start_phases(log: Path) -> dict[str, float]:
    """Seconds of loading, compiling, tuning and capturing, of the slowest rank."""
    # ranks work side by side, and each says so: a phase takes as long as its slowest rank
    spent: dict[tuple[str, str], float] = defaultdict(float)
    tuning: dict[str, datetime] = {}
    with log.open("rb") as file:
        for line in islice(bounded_lines(file), _MOST_LINES):
            named = _RANK.search(line)
            rank = (named[1] or named[2]) if named else ""
            for name, pattern in _PATTERNS:
                if found := pattern.search(line):
                    spent[name, rank] += float(found[1])
            if moment := _TUNING.search(line):
                try:
                    at = datetime.fromisoformat(moment[1].replace(",", "."))
                except ValueError:
                    continue
                if moment[2] == "starts":
                    tuning[rank] = at
                elif begun := tuning.pop(rank, None):
                    spent["tune_s", rank] += max(0.0, (at - begun).total_seconds())
    names = sorted({name for name, _ in spent})
    return {name: round(max(s for (n, _), s in spent.items() if n == name), 3) for name in names}


def kernel_choices(log: Path) -> list[str]:
    """Which backends and kernels the engine says it uses, each once, in its own words, sorted."""
    chosen: set[str] = set()
    with log.open("rb") as file:
        for line in islice(bounded_lines(file), _MOST_LINES):
            if len(chosen) == MOST_CHOICES:
                break
            if found := _CHOICE.search(line):
                # the engine chose the text: no control characters on a terminal
                chosen.add("".join(c for c in found[1] if c.isprintable()).strip("'\" .,"))
    return sorted(chosen)
