"""One process of a test: does the steps of its job and logs each of them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from .processes import StepLog


def main(job_path: str, log_path: str) -> None:
    """Run the job."""
    _end_with_parent()
    # they import torch: slow on a cold disk, so it belongs to the start, not to a step
    from . import copies, reduce

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    log = StepLog(Path(log_path), job)
    log.step("start", dict)
    kinds = {
        "card": lambda: log.step("card", lambda: card(job["device"])),
        "copies": lambda: copies.run(log, job),
        "writes": lambda: copies.run_writes(log, job),
        "reduce": lambda: reduce.run(log, job),
    }
    kinds[job["kind"]]()


def _end_with_parent() -> None:
    """Ask the kernel to kill this rank when its parent dies, so that none is left behind."""
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def card(device: str) -> dict[str, Any]:
    """The cards and versions that torch reports."""
    import torch

    report: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(torch),
        "count": torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1,
    }
    if device == "cuda":
        kinds = [torch.cuda.get_device_properties(i) for i in range(report["count"])]
        report["cards"] = [
            {
                "name": k.name,
                "capability": f"{k.major}.{k.minor}",
                "memory_bytes": k.total_memory,
                "processors": k.multi_processor_count,
            }
            for k in kinds
        ]
    return report


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, AssertionError, ImportError):
        return None
