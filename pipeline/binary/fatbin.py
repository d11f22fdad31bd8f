"""Fat binaries: containers in which each entry is one kernel module for one target.

A container is a head of 16 bytes (magic, version, size of the head, size of the rest), then
entries back to back: a head that names kind, target and flags, then the payload, which may be
compressed. The heads say all that is needed, so payloads are passed over.
Checked against cuobjdump 12.8 and 13.1 on what nvcc 12.8 to 13.4 write.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.binary.elf import Unreadable
from pipeline.binary.forward_reader import ForwardReader

MAGIC = bytes.fromhex("50ed55ba01001000")  # 0xBA55ED50, version 1, a head of 16 bytes
HEAD_BYTES = 16
PTX, CUBIN, NVVM = 1, 2, 8

_HEAD = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<HHIQ12xI8xQ16x")
_ENTRY_VERSION = 0x0101
_MAX_HEAD_BYTES = 1 << 20  # compile options may follow the fixed part
# `a`: for this card only; `f`: for its family (CUDA 12.9 and later)
_ARCH_SPECIFIC = 1 << 20
_FAMILY_SPECIFIC = 1 << 21
# sm_10 was the first; more than three digits would be another format
_OLDEST, _NEWEST = 10, 999


class Target(NamedTuple):
    """What one entry is for: `sm_120a` machine code, `compute_90` PTX."""

    kind: int
    arch: int
    suffix: str | None

    def __str__(self) -> str:
        if self.suffix is None:
            return f"sm_{self.arch} (a/f unknown)"
        name = {PTX: "compute", CUBIN: "sm", NVVM: "lto"}.get(self.kind, f"kind{self.kind}")
        return f"{name}_{self.arch}{self.suffix}"


def container_end(head: bytes, at: int, file_bytes: int) -> int:
    """Where the container that begins at a position ends."""
    if len(head) < HEAD_BYTES:
        raise Unreadable("a fatbin is cut off")
    _, size = _HEAD.unpack(head)
    end: int = at + HEAD_BYTES + size
    if end > file_bytes:
        raise Unreadable(f"a fatbin claims {size} bytes, more than the file has")
    return end


def fatbin_entries(reader: ForwardReader, end: int) -> Iterator[Target]:
    """The entries up to the container's end, which they must fill exactly."""
    while reader.position < end:
        head = reader.take(_ENTRY.size)
        if len(head) < _ENTRY.size or reader.position > end:
            raise Unreadable("a fatbin entry is cut off")
        kind, version, head_bytes, payload, arch, flags = _ENTRY.unpack(head)
        if version != _ENTRY_VERSION or not _ENTRY.size <= head_bytes <= _MAX_HEAD_BYTES:
            raise Unreadable(f"a fatbin entry of an unknown form ({version:#x}, {head_bytes})")
        if not _OLDEST <= arch <= _NEWEST:
            raise Unreadable(f"a fatbin entry for an unknown sm_{arch}")
        remaining = head_bytes - _ENTRY.size + payload
        if reader.position + remaining > end or reader.skip(remaining) < remaining:
            raise Unreadable("a fatbin entry extends past the end of its fatbin")
        if flags & _ARCH_SPECIFIC and flags & _FAMILY_SPECIFIC:
            raise Unreadable("a fatbin entry is both `a` and `f`")
        suffix = "a" if flags & _ARCH_SPECIFIC else "f" if flags & _FAMILY_SPECIFIC else ""
        yield Target(kind, arch, suffix)
