"""Python's bytecode of an image, compiled here for a start in an emulator.

Images hold sources alone, and bytecode is the same on every processor: an emulator takes minutes to
compile what one package imports, and the processor itself seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline import log, proc

VARIABLE = "PYTHONPYCACHEPREFIX"
_PLACES = ("usr/lib", "opt/venv/lib")
_DEEPEST = 30  # of folders below one another


def compile_bytecode(root: Path, to: Path) -> Path | None:
    """A folder for the image's VARIABLE; none where its Python is not of our version."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = [root / place / version for place in _PLACES if (root / place / version).is_dir()]
    if not folders:
        return None
    command = [
        *(sys.executable, "-m", "compileall", "-qq"),
        *("-j", str(len(os.sched_getaffinity(0))), "-r", str(_DEEPEST)),
        # the files' times differ in each unpacked copy
        *("--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"),
        *map(str, folders),
    ]
    with log.step("Compiling its Python files for the emulator"):
        # some files are templates or for other versions: they are compiled inside, if at all;
        # a variable, not -X: the workers of compileall inherit no -X option since Python 3.12
        proc.read(command, env=proc.environment(**{VARIABLE: str(to)}))
    # below the prefix lies the whole path of each file
    return to / root.resolve().relative_to("/")
