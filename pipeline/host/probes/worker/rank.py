"""One process of a test: says what it begins and what came out of it, a JSON line each."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import copies, reduce
from .steps import Voice


def main(job_path: str, answers_path: str) -> None:
    """Do what the job says."""
    _end_with_parent()
    import torch  # noqa: F401 -- slow on a cold disk, so it belongs to the start, not to a step

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    voice = Voice(Path(answers_path), job)
    voice.step("start", dict)
    kinds = {
        "card": lambda: voice.step("card", lambda: card(job["device"])),
        "copies": lambda: copies.run(voice, job),
        "writes": lambda: copies.run_writes(voice, job),
        "reduce": lambda: reduce.run(voice, job),
    }
    kinds[job["kind"]]()


def _end_with_parent() -> None:
    """Whoever started the tests may be killed; what they started must not stay behind."""
    set_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def card(device: str) -> dict[str, Any]:
    """What torch sees."""
    import torch

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(torch),
        "count": torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1,
    }
    if device == "cuda":
        kinds = [torch.cuda.get_device_properties(i) for i in range(found["count"])]
        found["cards"] = [
            {
                "name": k.name,
                "capability": f"{k.major}.{k.minor}",
                "memory_bytes": k.total_memory,
                "processors": k.multi_processor_count,
            }
            for k in kinds
        ]
    return found


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, AssertionError, ImportError):
        return None
