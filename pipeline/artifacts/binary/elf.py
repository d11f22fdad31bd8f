"""The little of ELF that is needed to find CUDA code and what a cubin was compiled for."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

# Field by field as in the ELF specification (elf.h). What NVIDIA puts into a cubin is documented
# nowhere: it is as ptxas 12.8 to 13.4 write it.
MAGIC = b"\x7fELF"
HEAD_BYTES = 64
EM_CUDA = 190
# 64 bits, little-endian: the only kind that is or carries CUDA code
MAGIC64 = MAGIC + b"\x02\x01\x01"

# the seventh byte is the ABI of the operating system, the eighth its version
_OLD_CUBIN = MAGIC64 + b"\x33\x07"
_NEW_CUBIN = MAGIC64 + b"\x41\x08"
_HEAD = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
# limits against files that are made to cost time and memory
_MAX_SECTIONS = 100_000
_MAX_NAMES_BYTES = 8 << 20
_MAX_NAME_BYTES = 64
_FIRST_WITH_VARIANTS = 90  # `a` came with Hopper, `f` with Blackwell
_NO_BYTES_IN_FILE = 8  # SHT_NOBITS
# A cubin of the new ABI names its target only in the options that ptxas was called with.
_OPTION = re.compile(rb"-arch sm_(\d{2,3})([af]?)[ \0]")


class Unreadable(Exception):
    """Why an object cannot be judged; never shown as passed."""


@dataclass(frozen=True)
class ElfHeader:
    """The head of a 64-bit little-endian ELF file."""

    machine: int
    table_offset: int
    section_bytes: int
    sections: int
    names_index: int
    end: int  # of what the header points at

    @property
    def table_bytes(self) -> int:
        return self.section_bytes * self.sections


@dataclass(frozen=True)
class Section:
    """A named stretch of the file."""

    name: str
    offset: int
    size_bytes: int
    alignment_bytes: int = 1

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


def read_header(head: bytes, file_bytes: int) -> ElfHeader:
    """The header, if everything it points at can be inside the file."""
    if len(head) < HEAD_BYTES:
        raise Unreadable("the ELF header is cut off")
    _, machine, _, _, segments, table, _, _, *sizes = _HEAD.unpack(head)
    segment_bytes, n_segments, entry, count, names = sizes
    segments_end = segments + segment_bytes * n_segments
    if segments_end > file_bytes:
        raise Unreadable("its program headers lie outside the file")
    if table == 0:
        return ElfHeader(machine, 0, entry, 0, names, segments_end)
    if entry != _SECTION.size:
        raise Unreadable(f"its section headers have {entry} bytes each")
    if table < HEAD_BYTES or table + max(count, 1) * entry > file_bytes:
        raise Unreadable("its section headers lie outside the file")
    if count == 0:
        raise Unreadable("it has too many sections")
    return ElfHeader(machine, table, entry, count, names, max(segments_end, table + count * entry))


def read_sections(
    header: ElfHeader, read: Callable[[int, int], bytes], file_bytes: int
) -> list[Section]:
    """The sections; `read` returns a range of the file, by its offset and size."""
    table = read(header.table_offset, header.table_bytes)
    if len(table) != header.table_bytes or header.sections > _MAX_SECTIONS:
        raise Unreadable("the section headers are cut off")
    found = []
    for at, kind, _, _, offset, size, _, _, alignment, _ in _SECTION.iter_unpack(table):
        size = 0 if kind == _NO_BYTES_IN_FILE else size
        if kind and offset + size > file_bytes:
            raise Unreadable("a section lies outside the file")
        found.append((at, offset, size, alignment))
    if not header.names_index < len(found):
        raise Unreadable("the names of its sections are missing")
    _, offset, size, _ = found[header.names_index]
    if size > _MAX_NAMES_BYTES:
        raise Unreadable(f"its section names take {size} bytes")
    names, sections = read(offset, size), []
    for at, *place in found:
        if at >= len(names):
            raise Unreadable("a section's name lies outside the names")
        # the first 64 bytes of it: a long name costs no time
        text = names[at : at + _MAX_NAME_BYTES].partition(b"\0")[0]
        sections.append(Section(text.decode("latin-1"), *place))
    return sections


def cubin_target(head: bytes, rest: bytes) -> tuple[int, str | None]:
    """What a cubin was compiled for: `(120, "a")`; the suffix is none where it is not known.

    It is in the header and, for the new ABI, in the options that the notes repeat.

    Old ABI (up to CUDA 12 for sm_90): SM in the low byte, `a` in bit 11, no `f` yet. New ABI: SM
    in the second byte; ptxas 12 still sets bit 3 for `a`, ptxas 13 sets nothing, and for `f`
    nothing but the note ever differed.
    """
    (flags,) = struct.unpack_from("<I", head, 48)
    if head.startswith(_OLD_CUBIN):
        arch = flags & 0xFF
        return arch, "a" if flags & 0x800 and arch >= _FIRST_WITH_VARIANTS else ""
    if not head.startswith(_NEW_CUBIN):
        raise Unreadable(f"a cubin of ABI {head[7]}.{head[8]}, which this reader does not know")
    arch = flags >> 8 & 0xFF
    if arch < _FIRST_WITH_VARIANTS:
        return arch, ""
    written = {(int(m[1]), m[2].decode()) for m in _OPTION.finditer(rest)}
    suffixes = {suffix for number, suffix in written if number == arch}
    if len(suffixes) == 1:
        return arch, suffixes.pop()
    return arch, "a" if flags & 0x8 else None
