"""Function tests of a machine's GPUs: what they do, not what they report.

Runs alone, in an engine image or anywhere with torch, without the rest of the pipeline:

    python3 pipeline/hosts/probes/worker OUT.json

Every test runs in processes of its own: one that hangs, dies or gives wrong data is a row of the
report, and its processes are ended. Exit codes: 0 passed, 1 failed, 2 nothing failed but something
is unknown.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import signal
import sys
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAME = "host_probes"


def load() -> None:
    """This folder as a package, but not on the import path, where torch would see its modules."""
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != FOLDER]
    spec = importlib.util.spec_from_file_location(
        NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    load()
    if sys.argv[1:2] == ["--rank"]:
        # ask the kernel to kill this rank when its parent dies, so that none outlives it
        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        # it imports torch: slow on a cold disk, so it belongs to the start, not to a step
        importlib.import_module(f"{NAME}.rank").main(sys.argv[2], sys.argv[3])
    else:
        sys.exit(importlib.import_module(f"{NAME}.main").main(sys.argv[1:]))
