"""Kernels compiled without a card: the same bytes twice, and used by the image's own Triton."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.smem.cases import KernelCase
from pipeline.images.gate.smem.image_gate import ImageGate, find_case, open_gate
from pipeline.images.gate.smem.run import ask_workers
from pipeline.images.warm.layer import pack_entries
from pipeline.images.warm.target import WarmAnswer, WarmTarget, open_warm
from tests.gpu.collect import gate_context

# one that a patch changes, one of many small ones, and one whose kernel is tuned
CASES = ("extend-mla-192-128", "merge-states-128", "kda-gate")
# Triton asks it for its version, which is part of every key, and may not compile with it
FAILING = (
    '#!/bin/sh\n[ "$1" = --version ] && exec "$0.real" --version\necho no compiler >&2\nexit 1\n'
)


@dataclass(frozen=True)
class Proving(WarmTarget):
    """The same calls with the layer in its place, and with compilers that fail."""

    def variables(self, cases: Sequence[KernelCase], work: Path) -> dict[str, str]:
        return {
            **super().variables(cases, work),
            "TRITON_CACHE_MANAGER": "sm120_warm:WarmCache",
            "SM120_WARM_ONLY": "1",
        }


@pytest.fixture(scope="module")
def gate(big_store: Path) -> Iterator[ImageGate]:
    context = gate_context(open_store(big_store))
    with context.store.in_use():
        yield open_gate(context, plan_image(context.checkout, "sglang-k2", "linux/amd64"))


def asked(target: WarmTarget, cases: Sequence[KernelCase]) -> dict[str, WarmAnswer]:
    answers = ask_workers(target, cases)
    return {each.case: each for each in answers if isinstance(each, WarmAnswer)}


@contextmanager
def sources_of(another_day: bool, gate: ImageGate) -> Iterator[None]:
    """The engine's sources and Triton's, unpacked on another day."""
    folders = (gate.patched().folder, gate.environment.folder / "site/triton")
    times = {path: path.stat() for folder in folders for path in folder.rglob("*.py")}
    try:
        for path in times if another_day else ():
            os.utime(path, (1_500_000_000, 1_500_000_000))
        yield
    finally:
        for path, was in times.items():
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.big
def test_entries_are_the_same_twice_and_serve_where_nothing_can_be_compiled(
    gate: ImageGate,
) -> None:
    plan = plan_image(gate.context.checkout, "sglang-k2-warm", "linux/amd64").warm
    assert plan
    cases, made = [find_case(gate.gates, name) for name in CASES], []
    for order in (cases, cases[::-1]):
        # nor do they depend on when the sources came to this machine
        with sources_of(order is not cases, gate), open_warm(gate, plan) as target:
            # nothing kept: each time in a new root, by new processes, in another order
            answers = asked(target, order)
            made.append(pack_entries(target, [(case, answers[case.name]) for case in cases], {}))
    assert made[0] == made[1]
    index, files = made[0]
    assert not index.missing
    assert not any(str(gate.context.store.root).encode() in data for data in files.values())
    with open_warm(gate, plan) as target:
        root = Path(target.sandbox.system)  # type: ignore[attr-defined]
        for path, data in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        ptxas = root / plan.base.venv.site / "triton/backends/nvidia/bin/ptxas"
        ptxas.rename(f"{ptxas}.real")
        ptxas.write_text(FAILING)
        ptxas.chmod(0o755)
        for name in ("gcc", "cc"):
            (root / "usr/bin" / name).unlink()
        proving = Proving(**vars(target))
        answers = asked(proving, cases)
    assert {(a.ended, a.message) for a in answers.values()} == {("called", "")}
    used = {entry.key for answer in answers.values() for entry in answer.entries}
    assert used == {*index.entries}
