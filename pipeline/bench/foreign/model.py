"""A foreign result: numbers under their own names, and the metrics of ours that they resemble."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pipeline.model import Digest, Frozen

Program: TypeAlias = Literal["vllm bench", "sglang.bench_serving", "aiperf"]


class ForeignNumber(Frozen):
    """One number; several values where the program repeated the measurement."""

    name: str  # as its program calls it
    unit: str
    values: list[float]
    like: str | None = None  # the nearest metric of ours, such as `ttft_ms.p99`
    difference: str = ""  # how its definition differs from that one; empty: not at all

    @property
    def ours(self) -> str | None:
        """The metric of ours that it may be compared with."""
        return self.like if not self.difference else None


class ForeignCell(Frozen):
    """One step of a foreign benchmark."""

    name: str  # as our cells are called, where it has a concurrency or a rate
    settings: dict[str, str]
    numbers: list[ForeignNumber]


class ForeignRun(Frozen):
    """A file or folder of another program."""

    program: Program
    file: str
    digest: Digest
    cells: list[ForeignCell]
