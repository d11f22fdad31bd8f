"""A folder of weights, looked at on the machine that has it. Standard library: it is sent there.

`look FOLDER FILE PARTS` prints what is there; `put NAME FILE` keeps stdin as a file in the user's
cache and prints its folder; `where NAME FILE` only prints it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_MOST_CONFIG_BYTES = 1 << 20


def look(folder: str, file: str, parts: str) -> dict[str, object]:
    """Returns its real path, if a file is in it, a split model's first parts, its config.json."""
    place = Path(folder)
    if not place.is_dir():
        return {"folder": None}
    config = place / "config.json"
    is_small = config.is_file() and config.stat().st_size <= _MOST_CONFIG_BYTES
    first = sorted(str(p.relative_to(place)) for p in (place / parts).glob("*-00001-of-*.gguf"))
    return {
        "folder": str(place.resolve()),
        "has_file": not file or (place / file).is_file(),
        "first_parts": first if parts else [],
        "config": config.read_text("utf-8", "replace") if is_small else None,
    }


def where(name: str, file: str) -> dict[str, object]:
    """The folder that `put` writes to."""
    folder = Path.home() / ".cache" / "sm120" / name
    has_file = (folder / file).is_file()
    return {"folder": str(folder.resolve()), "has_file": has_file}


def put(name: str, file: str, data: bytes) -> dict[str, object]:
    """Writes a file whole or not at all, readable for the user of a container."""
    folder = Path(str(where(name, file)["folder"]))
    folder.mkdir(parents=True, exist_ok=True)
    # next to the file: only within a file system is the rename atomic
    partial = folder / f".{os.getpid()}"
    partial.write_bytes(data)
    partial.chmod(0o644)
    partial.replace(folder / file)
    folder.chmod(0o755)
    return where(name, file)


if __name__ == "__main__":
    verb, first, second = sys.argv[1:4]
    if verb == "look":
        answer = look(first, second, sys.argv[4])
    elif verb == "where":
        answer = where(first, second)
    else:
        answer = put(first, second, sys.stdin.buffer.read())
    print(json.dumps(answer))
