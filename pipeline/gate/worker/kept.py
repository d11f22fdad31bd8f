"""Compiled kernels' needs, kept by everything that decides them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from .endings import Json


class KeptKernels:
    """A folder of findings, one file a kernel; without a folder nothing is kept."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def read(self, key: str) -> Json | None:
        """What was found before; a file that is half-written or foreign is as good as none."""
        if self._folder is None:
            return None
        try:
            found = json.loads((self._folder / key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        whole = isinstance(found, dict) and isinstance(found.get("shared_bytes"), int)
        return found if whole and found.pop("key", None) == key else None

    def write(self, key: str, found: Json) -> None:
        """Keep a finding; another process may be writing the same."""
        if self._folder is None:
            return
        temporary = self._folder / f"{key}.{os.getpid()}"
        temporary.write_text(json.dumps({**found, "key": key}), encoding="utf-8")
        os.replace(temporary, self._folder / key)


def kernel_key(src: Any, options: Json, arch: str) -> str:
    """Everything that decides what compiling a kernel gives."""
    import triton

    parts = [src.hash(), placeless(options), triton.__version__, arch]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def placeless(options: Json) -> str:
    """Compile options as text, without the folder that Triton's own libraries lie in."""
    shown = json.dumps(options, sort_keys=True, default=str)
    return re.sub(r'[^"\'\s(]*/site/triton/', "triton/", shown)
