"""Compiles Python files into the form that Python keeps of them. Runs with the image's own Python.

    python bytecode.py FOLDER LIST

LIST names files of an image in FOLDER, one in a line; their sources lie below it. What was compiled
goes beside each source, as NAMEc. Only the order of LIST decides the bytes: Python's writer shares
equal constants, and which of them are shared follows from what it saw before.
"""

from __future__ import annotations

import importlib.util
import marshal
import struct
import sys
import warnings
from pathlib import Path

# With a hash of the source, which Python compares: what somebody mounts over a file is compiled.
CHECKED_HASH = 0b11


def main(folder: str, listed: str) -> None:
    """Compiles each source; one that is no Python is left out."""
    warnings.simplefilter("ignore")  # of sources, about themselves
    for name in (Path(folder) / listed).read_text(encoding="utf-8").splitlines():
        path = Path(folder) / name
        source = path.read_bytes()
        try:
            code = compile(source, f"/{name}", "exec", dont_inherit=True, optimize=0)
        except (SyntaxError, ValueError, RecursionError):
            # templates, and tests of parsers
            continue
        head = importlib.util.MAGIC_NUMBER + struct.pack("<I", CHECKED_HASH)
        data = head + importlib.util.source_hash(source) + marshal.dumps(code)
        path.with_name(f"{path.name}c").write_bytes(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
