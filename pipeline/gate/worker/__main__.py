"""Compiles an engine's kernels for a card that is not there. Runs in the gate's environment.

It knows nothing of the pipeline and imports only the standard library before torch and Triton:

    python pipeline/gate/worker JOB ANSWERS

JOB is a JSON file; ANSWERS gets a JSON line when a case begins and another when it has ended.
torch is told that a card is present, Triton gets a driver that compiles but neither loads nor
launches, and then the engine's own functions are called on small CPU tensors: the block sizes
that get compiled are those the engine itself would choose on that card.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAME = "gate_worker"


def load() -> None:
    """This folder as a package, without putting it or its neighbours on the import path."""
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
    importlib.import_module(f"{NAME}.main").main(sys.argv[1], sys.argv[2])
