"""The tuner's worker with trials that crash or hang; imports nothing an engine would notice."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parents[2] / "pipeline/serving/tune/worker"


def main(job: str, *once: str) -> None:
    """As the worker itself, or as one of its processes."""
    spec = importlib.util.spec_from_file_location("tune_worker", WORKER / "__main__.py")
    assert spec
    assert spec.loader
    worker: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    trial, start = worker.trial, subprocess.Popen

    def plant(job: dict[str, Any], request: dict[str, Any], calling: Any) -> Any:
        config = request["config"] or {}
        if config.get("num_warps") == 8:
            os.abort()
        if config.get("num_stages") == 2:
            time.sleep(1000)
        return trial(job, request, calling)

    def started(command: list[str], **options: Any) -> Any:
        # its processes are planted as well
        words = [sys.executable, __file__, *command[2:]]
        return start(words if command[0] == sys.executable else command, **options)

    worker.trial, worker.subprocess.Popen = plant, started
    sys.argv = [str(WORKER), job, *once]
    worker.once() if once else worker.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
