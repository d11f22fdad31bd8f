"""A toolchain is tried before the first step: it may be for another processor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.artifacts.containers.backend import SandboxBackend, StepContainer
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import SandboxUnavailable
from pipeline.images.assemble.plan import plan_tree
from pipeline.images.source import compiled
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import CompiledSpec

SHIPPED = Checkout(Path(__file__).resolve().parents[3])
PLAN = plan_tree(SHIPPED, CompiledSpec(source="ik-llama", build="cpu-arm64"), "linux/arm64")


def tried(monkeypatch: pytest.MonkeyPatch, root: Path, code: int, *lines: str) -> list[list[str]]:
    asked: list[list[str]] = []

    def run(backend: Any, container: Any, command: list[str], on_line: Any) -> int:
        asked.append(command)
        for line in lines:
            on_line(line)
        return code

    monkeypatch.setattr(compiled, "run_step", run)
    container = cast(StepContainer, SimpleNamespace(limits=SimpleNamespace(cpus=1)))
    compiled._run_steps(
        Store(root), cast(SandboxBackend, SimpleNamespace(kind="namespaces")), container, PLAN
    )
    return asked


def test_a_toolchain_that_runs_here_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, *steps = tried(monkeypatch, tmp_path, 0)
    assert first == ["true"]
    assert len(steps) == len(PLAN.build.steps)


@pytest.mark.parametrize(
    ("code", "lines", "reason"),
    [
        (125, ["sandbox: true: Exec format error"], "Exec format error"),
        (126, ["first", "exec /usr/bin/true: exec format error"], "exec format error"),
        (1, [], "no reason given"),
    ],
)
def test_one_that_does_not_run_here_is_named_with_its_platform_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, lines: list[str], reason: str
) -> None:
    with pytest.raises(SandboxUnavailable, match=reason) as caught:
        tried(monkeypatch, tmp_path, code, *lines)
    assert "cross-toolchain for linux/amd64" in str(caught.value)
