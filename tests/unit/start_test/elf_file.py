"""ELF files as small as the loader's questions: what they need, and where they look."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

ARM, AMD = 183, 62  # EM_AARCH64, EM_X86_64
_HEAD, _SEGMENT = 64, 56


def write_elf(
    path: Path,
    needed: Sequence[str] = (),
    *,
    soname: str = "",
    rpath: str = "",
    runpath: str = "",
    machine: int = ARM,
) -> Path:
    """A shared library without code."""
    tags = [
        *((1, name) for name in needed),
        *(x for x in ((14, soname), (15, rpath), (29, runpath)) if x[1]),
    ]
    strings, entries = b"\0", []
    for tag, text in tags:
        entries.append((tag, len(strings)))
        strings += text.encode() + b"\0"
    table = _HEAD + 2 * _SEGMENT + 16 * (len(entries) + 3)
    entries += [(5, table), (10, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    size = table + len(strings)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    at = _HEAD + 2 * _SEGMENT
    about = struct.pack("<IIQQQQQQ", 2, 4, at, at, at, len(dynamic), len(dynamic), 8)
    rest = (3, machine, 1, 0, _HEAD, 0, 0, _HEAD, _SEGMENT, 2, 0, 0, 0)
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack("<HHIQQQIHHHHHH", *rest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + load + about + dynamic + strings)
    return path
