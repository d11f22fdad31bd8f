"""Starts the function tests with a Python that has torch, and reads their answer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline import proc
from pipeline.errors import FactsUnreadable, ProbeUnstarted
from pipeline.model import Frozen

PROBES = Path(__file__).with_name("probes")
# What the engine's own environment decides about CUDA and NCCL must reach the tests too.
_PASSED = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")


class ProbeRow(Frozen):
    """One test of one thing."""

    check: str
    subject: str
    verdict: Literal["passed", "failed", "unknown", "not applicable"]
    why: str
    measured: dict[str, Any]


class ProbeAnswer(Frozen):
    """What the tests found."""

    version: Literal[1]
    verdict: Literal["passed", "failed", "unknown"]
    device: Literal["cuda", "cpu"]
    count: int
    seconds: float
    floors: dict[str, float]
    rows: list[ProbeRow]

    def lines(self) -> list[str]:
        """The answer as a log, for the table of known issues."""
        said = [f"{r.check} {r.subject}: {r.why}" for r in self.rows if r.why]
        words = [w for r in self.rows for w in r.measured.get("words", [])]
        return [*said, *(line for w in words for line in w.splitlines())]


def read_answer(path: Path) -> ProbeAnswer:
    """An answer that was kept."""
    try:
        return ProbeAnswer.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, RecursionError) as error:
        words = str(error).splitlines()[0]
        raise FactsUnreadable(f"{path}: is no answer of the function tests: {words}") from error


def run_probes(
    python: str, arguments: Sequence[str], settings: dict[str, str] | None = None
) -> ProbeAnswer:
    """Run them here; each of their processes has its own time limit."""
    with tempfile.TemporaryDirectory(prefix="sm120-probes-") as folder:
        answer = Path(folder) / "answer.json"
        names = [n for n in _nccl_names() if n not in (settings or {})]
        env = proc.environment(*_PASSED, *names, **(settings or {}))
        done = proc.read([python, str(PROBES), str(answer), *arguments], env=env)
        if not answer.is_file():
            words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ProbeUnstarted(f"{python}: {' '.join(words) or 'the tests said nothing'}")
        return read_answer(answer)


def _nccl_names() -> list[str]:
    import os

    return [n for n in os.environ if n.startswith(("NCCL_", "GLOO_", "OMP_"))]


def as_json(answer: ProbeAnswer) -> dict[str, Any]:
    """For programs."""
    found: dict[str, Any] = json.loads(answer.model_dump_json())
    return found
