"""Keeps what Python compiles of modules in zip files, which it forgets after each import.

Ansible sends every task as a zip of sources, and the node compiled the same forty modules for each
of them: 200 of the 230 ms that a task takes. A real host does so too and has the cores for it.
"""

from __future__ import annotations

import _imp
import marshal
import os
import zipimport

_compile = zipimport._compile_source  # type: ignore[attr-defined]


def _kept(pathname: str, source: bytes) -> object:
    place = f"/tmp/zip-code-{os.geteuid()}"
    name = f"{place}/{_imp.source_hash(120, source).hex()}-{len(source)}"
    try:
        # no pathlib here: importing it would cost more than is saved
        with open(name, "rb") as file:  # noqa: PTH123
            return marshal.load(file)
    except (OSError, EOFError, ValueError, TypeError):
        code = _compile(pathname, source)
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)  # noqa: PTH103
        with open(f"{name}.{os.getpid()}", "wb") as file:  # noqa: PTH123
            marshal.dump(code, file)
        os.replace(f"{name}.{os.getpid()}", name)
    except OSError:  # a test's full disk, or a read-only one
        pass
    return code


zipimport._compile_source = _kept  # type: ignore[attr-defined]
