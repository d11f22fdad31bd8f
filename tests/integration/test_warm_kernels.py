"""Kernels compiled without a card: the same bytes twice, and used by the image's own Triton."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.assemble.plan import WARM_READER, plan_image
from pipeline.images.gate.smem.cases import KernelCase
from pipeline.images.gate.smem.engine import unpack_kept
from pipeline.images.gate.smem.image_gate import ImageGate, find_case, open_gate
from pipeline.images.gate.smem.run import ask_workers
from pipeline.images.warm.layer import FOLDER, INDEX, pack_entries, read_warm
from pipeline.images.warm.target import WarmAnswer, WarmTarget, open_warm
from tests.gpu.collect import gate_context
from tests.testbed.packages import CannotHave

CASES = {
    # one that a patch changes, one of many small ones, and one whose kernel is tuned
    "sglang-k2": ("extend-mla-192-128", "merge-states-128", "kda-gate"),
    # Triton's own keys of the first and the third depend on which of the two is called first
    "vllm": ("v1-rejection", "v1-watermark-sample", "v1-rejection-plain", "ssd-state"),
}
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


@pytest.fixture(scope="module", params=[*CASES])
def gate(big_store: Path, request: pytest.FixtureRequest) -> Iterator[ImageGate]:
    context = gate_context(open_store(big_store))
    with context.store.in_use():
        yield open_gate(context, plan_image(context.checkout, request.param, "linux/amd64"))


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
    image = gate.plan.spec.name
    plan = plan_image(gate.context.checkout, f"{image}-warm", "linux/amd64").warm
    assert plan
    cases, made = [find_case(gate.gates, name) for name in CASES[image]], []
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
        for path, data in files.items():
            (root_of(target) / path).parent.mkdir(parents=True, exist_ok=True)
            (root_of(target) / path).write_bytes(data)
        answers = asked(without_compilers(target), cases)
    assert {(a.ended, a.message) for a in answers.values()} == {("called", "")}
    used = {entry.key for answer in answers.values() for entry in answer.entries}
    assert used == {*index.entries}


@pytest.mark.big
@pytest.mark.parametrize("image", ["sglang-k2-warm", "sglang-warm", "vllm-warm"])
def test_a_shipped_layer_serves_every_case_where_nothing_can_be_compiled(
    big_store: Path, image: str
) -> None:
    context = gate_context(open_store(big_store))
    plan = plan_image(context.checkout, image, "linux/amd64").warm
    assert plan
    with context.store.in_use():
        layer, index = context.store.layer(plan.key), read_warm(context.store, plan)
        if layer is None or index is None:
            raise CannotHave(f"`sm120 build {image}` makes the layer that is tried here.")
        gate = open_gate(context, plan.base)
        left_out = {each.case for each in index.missing}
        cases = [case for case in gate.gates.cases() if case.name not in left_out]
        assert cases
        with open_warm(gate, plan) as target:
            # Triton's part: FlashInfer's modules and compiled Python files are not asked for here
            wanted = (triton := f"{FOLDER}/triton/", INDEX, f"{target.site[1:]}/{WARM_READER.name}")
            unpack_kept(
                *(context.store, [layer]),
                lambda row: row.path if row.path.startswith(wanted) else None,
                root_of(target),
            )
            answers = asked(without_compilers(target), cases)
            # an entry less, and only the cases that it serves fail
            key, entry = min(index.entries.items(), key=lambda each: len(each[1].cases))
            for path in (root_of(target) / triton / key).iterdir():
                path.unlink()
            others = [case for case in cases if case.name not in entry.cases][:3]
            few = [find_case(gate.gates, name) for name in entry.cases[:3]]
            without = asked(without_compilers(target), [*few, *others])
    assert {*answers} == {case.name for case in cases}
    assert {(a.ended, a.message) for a in answers.values()} == {("called", "")}
    served = {entry.key for answer in answers.values() for entry in answer.entries}
    assert {key for key, each in index.entries.items() if {*each.cases} - left_out} <= served
    assert served <= {*index.entries}
    assert not {without[case.name].message for case in others} - {""}
    assert all("no warm kernel" in without[case.name].message for case in few)


def root_of(target: WarmTarget) -> Path:
    return Path(target.sandbox.system)  # type: ignore[attr-defined]


def without_compilers(target: WarmTarget) -> Proving:
    ptxas = root_of(target) / target.plan.base.venv.site / "triton/backends/nvidia/bin/ptxas"
    real = ptxas.with_name("ptxas.real")
    if not real.exists():
        ptxas.rename(real)
        ptxas.write_text(FAILING)
        ptxas.chmod(0o755)
    for name in ("gcc", "cc"):
        (root_of(target) / "usr/bin" / name).unlink(missing_ok=True)
    return Proving(**vars(target))
