"""Objects for the architecture gate: compiled ones, and small made-up ones that may lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from pipeline.artifacts.binary.fatbin import CUBIN, MAGIC
from pipeline.artifacts.binary.modules import Module, Opener, read_modules

DATA = Path(__file__).parent / "data"
A, F = 1 << 20, 1 << 21

# what cuobjdump 13.1 prints for each (`-all`), PTX and LTO code under their own names
CUOBJDUMP = {
    "sm_90a.fatbin": ["sm_90a"],
    "sm_100a.fatbin": ["sm_100a"],
    "sm_120.fatbin": ["sm_120"],
    "sm_120a.fatbin": ["sm_120a"],
    "sm_120f.fatbin": ["sm_120f"],
    "compute_120.fatbin": ["compute_120"],
    "compute_120a.fatbin": ["compute_120a"],
    "compute_120f.fatbin": ["compute_120f"],
    "lto_120.fatbin": ["lto_120", "sm_90"],
    "mixed.so": ["compute_80", "sm_120f", "sm_90a"],
    "hopper.so": ["sm_90a"],
    "relocatable.o": ["sm_120"],
    "plain.so": [],
    "sm_90.ptxas-12.8.cubin": ["sm_90"],
    "sm_90a.ptxas-12.8.cubin": ["sm_90a"],
    "sm_120a.ptxas-12.8.cubin": ["sm_120a"],
    "sm_120.cubin": ["sm_120"],
    "sm_120a.cubin": ["sm_120a"],
    # cuobjdump itself says sm_120 of this one: it does not read the note
    "sm_120f.cubin": ["sm_120f"],
}


def opener(data: bytes, chunk_bytes: int = 1 << 20) -> Opener:
    """The bytes as a layer would give them."""

    def chunks() -> Iterator[bytes]:
        for at in range(0, len(data), chunk_bytes):
            yield data[at : at + chunk_bytes]

    return chunks


def modules_of(data: bytes, chunk_bytes: int = 1 << 20) -> dict[Module, int]:
    return dict(read_modules(opener(data, chunk_bytes), len(data)))


def names_of(data: bytes, chunk_bytes: int = 1 << 20) -> list[str]:
    """All targets of an object, as words."""
    return sorted({str(t) for module in modules_of(data, chunk_bytes) for t in module})


def entry(
    arch: int = 120,
    kind: int = CUBIN,
    flags: int = 0x11,
    payload: bytes = b"x" * 16,
    *,
    version: int = 0x0101,
    head_bytes: int = 64,
    claimed: int | None = None,
) -> bytes:
    """One fatbin entry; its size may lie."""
    size = len(payload) if claimed is None else claimed
    head = struct.pack("<HHIQ12xI8xQ16x", kind, version, head_bytes, size, arch, flags)
    return head + payload


def container(*entries: bytes, claimed: int | None = None) -> bytes:
    """A fatbin; its size may lie."""
    body = b"".join(entries)
    return MAGIC + struct.pack("<Q", len(body) if claimed is None else claimed) + body


def host_object(
    sections: dict[str, bytes],
    *,
    machine: int = 62,
    names_last: bool = True,
    extra: bytes = b"",
    alignment: int = 8,
) -> bytes:
    """An ELF file with these sections; the names stand before the headers or right at the start."""
    names = b"\0" + b"".join(n.encode() + b"\0" for n in [*sections, ".shstrtab"])
    parts = {**sections, ".shstrtab": names}
    if not names_last:
        parts = {".shstrtab": names, **sections}
    body, table, at = bytearray(), bytearray(64), 64
    for name, data in parts.items():
        begin = names.index(name.encode() + b"\0")
        table += struct.pack("<IIQQQQIIQQ", begin, 1, 0, 0, at, len(data), 0, 0, alignment, 0)
        padded = data + b"\0" * (-len(data) % 8)
        body += padded
        at += len(padded)
    body += extra
    at += len(extra)
    index = list(parts).index(".shstrtab") + 1
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    head += struct.pack(
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, at, 0, 64, 0, 0, 64, len(parts) + 1, index
    )
    return head + bytes(body) + bytes(table)
