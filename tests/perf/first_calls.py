"""How long a kernel's first call takes on a card: with entries compiled before, and without."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace
from pathlib import Path
from statistics import median

from pipeline.artifacts.store.store import Store
from tests.gpu import warm
from tests.perf.measure import Report

IMAGE = "sglang-k2"
_NAMES = "import torch, triton; print(torch.cuda.get_device_name(), triton.__version__)"


def measure_first_calls(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
    """Every case of the gate, called once compiling and once where compilers fail.

    By the Python that `SM120_CARD_PYTHON` names, which has torch and Triton. A machine without the
    built image takes what `python -m tests.gpu.warm collect` made, from `SM120_COLLECTED`.
    """
    python = os.environ.get("SM120_CARD_PYTHON", "python3")
    found = subprocess.run([python, "-c", _NAMES], capture_output=True, text=True, check=False)
    if found.returncode:
        why = "no card, or SM120_CARD_PYTHON names no Python with torch and Triton"
        return report.fact(f"first calls of {IMAGE}'s kernels", f"not measured: {why}")
    collected, result = scratch / "collected", scratch / "result"
    if elsewhere := os.environ.get("SM120_COLLECTED"):
        collected.mkdir()
        (collected / IMAGE).symlink_to(Path(elsewhere).resolve() / IMAGE)
    else:
        warm.collect(collected, (IMAGE,))
    words = [python, warm.__file__, "prove", str(collected), str(result)]
    subprocess.run(words, check=True)
    cases = json.loads((result / "report.json").read_text())[IMAGE]["cases"].values()
    both = [c for c in cases if all(isinstance(c.get(way), float) for way in ("cold", "warm"))]
    wrong = [c for c in both if not c["same numbers"]]
    cold, hot = (median(1000 * c[way] for c in both) for way in ("cold", "warm"))
    ratio = median(c["warm"] / c["cold"] for c in both)
    return report.fact(
        f"first calls of {IMAGE}'s kernels on {found.stdout.strip()}",
        f"{len(both)} of {len(cases)} cases ran both ways, {len(wrong)} with other numbers; median"
        f" {hot:.1f} ms compiled before, {cold:.1f} ms compiling; ratio {ratio:.3f}",
    )
