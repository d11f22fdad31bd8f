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

from pipeline.artifacts.binary.elf import Unreadable

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


class CodeTarget(NamedTuple):
    """What one entry is for: `sm_120a` machine code, `compute_90` PTX."""

    kind: int
    arch: int
    suffix: str | None

    def __str__(self) -> str:
        if self.suffix is None:
            return f"sm_{self.arch} (a/f unknown)"
        name = {PTX: "compute", CUBIN: "sm", NVVM: "lto"}.get(self.kind, f"kind{self.kind}")
        return f"{name}_{self.arch}{self.suffix}"


class ForwardReader:
    """Chunks with a read position; a range asked for in time is kept while it passes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = b""
        self._start = 0  # where the buffer begins in the file
        self._at = 0  # the read position within the buffer
        self._searched: dict[bytes, int] = {}  # up to where in the file a needle is not
        self._kept: dict[int, tuple[int, bytearray]] = {}

    @property
    def position(self) -> int:
        return self._start + self._at

    def take(self, n_bytes: int) -> bytes:
        """The next bytes; fewer only where the file ends."""
        while len(self._buffer) - self._at < n_bytes and self._pull():
            pass
        data = self._buffer[self._at : self._at + n_bytes]
        self._at += len(data)
        return data

    def peek(self, n_bytes: int) -> bytes:
        """The next bytes, which stay where they are."""
        data = self.take(n_bytes)
        self._at -= len(data)
        return data

    def skip(self, n_bytes: int) -> int:
        """Skips so many bytes; returns how many the file had."""
        remaining = n_bytes
        while remaining > (ready := len(self._buffer) - self._at):
            remaining -= ready
            self._at = len(self._buffer)
            if not self._pull():
                return n_bytes - remaining
        self._at += remaining
        return n_bytes

    def find(self, *needles: bytes) -> bytes:
        """Goes to the nearest of the needles; empty, and at the end, where none is left."""
        while True:
            matches = [(i, n) for n in needles if (i := self._next(n)) >= 0]
            if matches:
                self._at, needle = min(matches)
                return needle
            # the last bytes may begin a needle that the next chunk completes
            self._at = max(self._at, len(self._buffer) - max(map(len, needles)) + 1)
            if not self._pull():
                self._at = len(self._buffer)
                return b""

    def _next(self, needle: bytes) -> int:
        """Where the needle is in the buffer; what was searched once is not searched again."""
        begin = max(self._at, self._searched.get(needle, 0) - self._start)
        index = self._buffer.find(needle, begin)
        end = index if index >= 0 else max(begin, len(self._buffer) - len(needle) + 1)
        self._searched[needle] = self._start + end
        return index

    def keep(self, offset: int, size_bytes: int) -> None:
        """Keeps a range that has not passed yet."""
        self._kept[offset] = (size_bytes, bytearray())
        self._tap(self._start, self._buffer)

    def kept(self, offset: int) -> bytes:
        """What passed of a range that was asked for."""
        return bytes(self._kept[offset][1])

    def _pull(self) -> bool:
        """Drops what was read and appends the next chunk."""
        chunk = next(self._chunks, b"")
        self._tap(self._start + len(self._buffer), chunk)
        self._buffer = self._buffer[self._at :] + chunk
        self._start += self._at
        self._at = 0
        return bool(chunk)

    def _tap(self, start: int, data: bytes) -> None:
        for offset, (size_bytes, out) in self._kept.items():
            first = max(offset + len(out), start) - start
            if start <= offset + len(out):
                out += data[first : offset + size_bytes - start]


def fatbin_entries(reader: ForwardReader, file_bytes: int) -> Iterator[CodeTarget]:
    """The entries of the container at the reader's position, which they must fill exactly."""
    start, head = reader.position, reader.take(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        raise Unreadable("a fatbin is cut off")
    _, size = _HEAD.unpack(head)
    end: int = start + HEAD_BYTES + size
    if end > file_bytes:
        raise Unreadable(f"a fatbin claims {size} bytes, more than the file has")
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
        yield CodeTarget(kind, arch, suffix)
