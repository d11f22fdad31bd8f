"""Compiles an engine's kernels for a card that is not there. Runs in the gate's environment.

It knows nothing of the pipeline and imports only the standard library before torch and Triton:

    python pipeline/images/gate/worker JOB ANSWERS

JOB is a JSON file; ANSWERS gets a JSON line when a case begins and another when it has ended.
torch reports that a card is present, Triton gets a driver that compiles but neither loads nor
launches, and then the engine's own functions are called on small CPU tensors: the block sizes
that get compiled are those the engine itself would choose on that card.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAME = "gate_worker"


def load() -> None:
    """This folder as a package, without putting it or its neighbours on the import path."""
    # numbers.py here would otherwise hide the standard library's, which NumPy imports
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != FOLDER]
    package = types.ModuleType(NAME)
    package.__path__ = [str(FOLDER)]
    sys.modules[NAME] = package


if __name__ == "__main__":
    load()
    importlib.import_module(f"{NAME}.main").main(sys.argv[1], sys.argv[2])
