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
# that of the parser gate has stand-ins for what is not there, and a tokenizer of bytes
PACKAGES = {
    "template_worker": FOLDER,
    "parser_worker": FOLDER.parent.parent / "parsers" / "worker",
}


if __name__ == "__main__":
    # folders as packages, without putting them or their neighbours on the import path
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != FOLDER]
    for name, folder in PACKAGES.items():
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    importlib.import_module("template_worker.rendering").render_all(sys.argv[1], sys.argv[2])
