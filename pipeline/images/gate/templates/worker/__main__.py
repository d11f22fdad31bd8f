"""Renders conversations by an engine's own code. Runs in the image, without torch and GPU:

    python pipeline/images/gate/templates/worker JOB ANSWERS

JOB is a JSON file; ANSWERS gets a JSON line when a case begins and another when it has ended.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# stand-ins for what is not there, and a tokenizer of bytes
PARSERS = FOLDER.parent.parent / "parsers" / "worker"
NAME = "template_worker"


if __name__ == "__main__":
    # both folders as one package, without putting them or their neighbours on the import path
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != FOLDER]
    package = types.ModuleType(NAME)
    package.__path__ = [str(FOLDER), str(PARSERS)]
    sys.modules[NAME] = package
    importlib.import_module(f"{NAME}.rendering").work_through(sys.argv[1], sys.argv[2])
