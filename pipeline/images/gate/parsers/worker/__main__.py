"""Drives an engine's own chat endpoint with known answers, cut in every way. Runs in the image.

It knows nothing of the pipeline, needs no torch and no GPU, and imports only the standard library
before the engine:

    python pipeline/images/gate/parsers/worker JOB ANSWERS

JOB is a JSON file; ANSWERS gets a JSON line when a case begins and another when it has ended.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAME = "parser_worker"


if __name__ == "__main__":
    # this folder as a package, without putting it or its neighbours on the import path
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != FOLDER]
    package = types.ModuleType(NAME)
    package.__path__ = [str(FOLDER)]
    sys.modules[NAME] = package
    importlib.import_module(f"{NAME}.job").work_through(sys.argv[1], sys.argv[2])
