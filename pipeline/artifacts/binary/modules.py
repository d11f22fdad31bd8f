"""What CUDA code a file holds: one pass over its bytes, whatever its size."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from pipeline.artifacts.binary import elf, fatbin
from pipeline.artifacts.binary.elf import Section, Unreadable
from pipeline.artifacts.binary.fatbin import CodeTarget, ForwardReader

Module = tuple[CodeTarget, ...]
Opener = Callable[[], Iterator[bytes]]

# nvcc -rdc=true puts code that is still to be linked into a section of its own.
_UNLINKED = "__nv_relfatbin"
_SECTIONS = (".nv_fatbin", _UNLINKED)
# What a linker may leave between two fatbins: this much, or less than the section's alignment,
# which is 256 bytes in objects for arm64.
_ALIGNMENT_BYTES = 64
_MAX_ALIGNMENT_BYTES = 256
# Limits against files that are made to cost time and memory; the largest library seen (cuFFT) has
# 24,000 modules.
_MAX_MODULES = 100_000
_MAX_TARGETS = 200_000
_MAX_LOOKS = 200_000
_MAX_SECTIONS = 16
_MAX_CUBIN_BYTES = 64 << 20
_MAX_NOTES_BYTES = 4 << 20
_NAMES_NEAR_BYTES = 1 << 16  # linkers put the names right before the section headers
# Some files named .so are text that tells the linker where to look.
_TEXT_HEADS = (b"/* GNU ld script", b"INPUT", b"GROUP", b"OUTPUT_FORMAT")


class _Endless(Unreadable):
    """More of something than any real library has: nothing more is read."""


class Span(NamedTuple):
    """A module and where it lies in the file."""

    start: int
    end: int
    module: Module


@dataclass
class Scan:
    """The modules that were met, in the file's order, and what only looked like one."""

    spans: list[Span] = field(default_factory=list)
    doubts: list[tuple[int, str]] = field(default_factory=list)
    targets: int = 0

    def read_fatbin(self, reader: ForwardReader, file_bytes: int) -> None:
        """Adds the fatbin at the reader's position."""
        start = reader.position
        # one more than allowed is enough to know
        module = tuple(islice(fatbin.fatbin_entries(reader, file_bytes), _MAX_TARGETS + 1))
        self.add(module, start, reader.position)

    def add(self, module: Module, start: int, end: int) -> None:
        # by name: a suffix that is not known is None, which has no order among texts
        self.spans.append(Span(start, end, tuple(sorted(set(module), key=str))))
        self.targets += len(module)
        if len(self.spans) > _MAX_MODULES or self.targets > _MAX_TARGETS:
            raise _Endless("more fatbin entries than any real library has")


def read_modules(open_file: Opener, file_bytes: int) -> Counter[Module]:
    """The modules of an object, a cubin or a fatbin, each with how often it is there.

    The file is always read to its end, where it is compared with its hash: damage on this disk is
    not to be taken for a bad object.
    """
    chunks = open_file()
    try:
        reader = ForwardReader(chunks)
        head = reader.peek(elf.HEAD_BYTES)
        if head.startswith(fatbin.MAGIC):
            scan = Scan()
            while reader.position < file_bytes:
                if not reader.peek(fatbin.HEAD_BYTES).startswith(fatbin.MAGIC):
                    raise Unreadable("other bytes follow a fatbin")
                scan.read_fatbin(reader, file_bytes)
            return Counter(span.module for span in scan.spans)
        if head.startswith(_TEXT_HEADS):
            return Counter()
        if not head.startswith(elf.MAGIC):
            raise Unreadable("neither an ELF file nor a fatbin")
        reader.skip(len(head))
        if len(head) < elf.HEAD_BYTES:
            raise Unreadable("the ELF header is cut off")
        if not head.startswith(elf.MAGIC64):
            # CUDA code does not exist for 32-bit or big-endian hosts
            if reader.find(fatbin.MAGIC):
                raise Unreadable("a fatbin in a 32-bit or big-endian object")
            return Counter()
        header = elf.read_header(head, file_bytes)
        if header.machine != elf.EM_CUDA:
            return _host_object(open_file, reader, header, file_bytes)
        if file_bytes > _MAX_CUBIN_BYTES:
            raise Unreadable(f"a cubin of {file_bytes} bytes is too large")
        rest = reader.take(file_bytes)
        if len(head) + len(rest) < file_bytes:
            raise Unreadable("the cubin is cut off")
        return Counter({(CodeTarget(fatbin.CUBIN, *elf.cubin_target(head, rest)),): 1})
    finally:
        deque(chunks, maxlen=0)


def _host_object(
    open_file: Opener, reader: ForwardReader, header: elf.ElfHeader, file_bytes: int
) -> Counter[Module]:
    """All fatbins and loose cubins: cuFFT keeps 24,000 among its data, outside any section."""
    # kept as they pass: a second pass would inflate a library of gigabytes again
    near = max(elf.HEAD_BYTES, header.table_offset - _NAMES_NEAR_BYTES)
    reader.keep(near, max(0, header.table_offset - near))
    reader.keep(header.table_offset, header.table_bytes)
    scan, looks = Scan(), 0
    while needle := reader.find(fatbin.MAGIC, elf.MAGIC64):
        start, looks = reader.position, looks + 1
        if looks > _MAX_LOOKS:
            raise _Endless("more that looks like a fatbin than any real library has")
        try:
            if needle == fatbin.MAGIC:
                scan.read_fatbin(reader, file_bytes)
                continue
            # a cubin; other ELF files are skipped
            head = reader.take(elf.HEAD_BYTES)
            inner = elf.read_header(head, file_bytes - start)
            if inner.machine == elf.EM_CUDA:
                # enough for the notes that name its target, whatever the header claims
                rest = reader.take(min(max(0, inner.end - elf.HEAD_BYTES), _MAX_NOTES_BYTES))
                target = CodeTarget(fatbin.CUBIN, *elf.cubin_target(head, rest))
                scan.add((target,), start, reader.position)
        except _Endless:
            raise
        except Unreadable as doubt:
            scan.doubts.append((start, str(doubt)))
    if reader.position < file_bytes:
        raise Unreadable("the file is cut off")

    def read(offset: int, size_bytes: int) -> bytes:
        if (offset, size_bytes) == (header.table_offset, header.table_bytes):
            return reader.kept(offset)
        if near <= offset and offset + size_bytes <= header.table_offset:
            return reader.kept(near)[offset - near :][:size_bytes]
        # a second pass, for names that are elsewhere
        again = ForwardReader(open_file())
        again.skip(offset)
        return again.take(size_bytes)

    sections = elf.read_sections(header, read, file_bytes) if header.sections else []
    # only sections tell data that looks like a fatbin from a fatbin that is broken
    if scan.doubts and not sections:
        raise Unreadable(scan.doubts[0][1])
    carrying = [s for s in sections if s.name in _SECTIONS and s.size_bytes]
    if len(carrying) > _MAX_SECTIONS:
        raise Unreadable(f"{len(carrying)} sections for fatbins are too many")
    # unexplained bytes may be code for any card, so they are not passed over
    for section in carrying:
        _require_whole(scan, section)
    unlinked = [s for s in carrying if s.name == _UNLINKED]
    # without code that is only there to be linked, unless there is nothing else
    linked = [s for s in scan.spans if not any(u.offset <= s.start < u.end for u in unlinked)]
    return Counter(span.module for span in linked or scan.spans)


def _require_whole(scan: Scan, section: Section) -> None:
    """Every byte of a section for fatbins belongs to one that was read."""
    for at, reason in scan.doubts:
        if section.offset <= at < section.end:
            raise Unreadable(reason)
    at = section.offset
    gap = max(_ALIGNMENT_BYTES, min(section.alignment_bytes, _MAX_ALIGNMENT_BYTES))
    for start, end, _ in scan.spans:
        if end <= section.offset or start >= section.end:
            continue
        if start < at or end > section.end:
            raise Unreadable(f"a fatbin extends past the end of {section.name}")
        if start - at > gap:
            break
        at = end
    if section.end - at > gap:
        raise Unreadable(f"{section.name} holds bytes at {at:#x} that are not a fatbin")


def broken_promise(modules: Iterable[Module], promised: Collection[str]) -> str:
    """What is there instead of machine code for exactly these; empty where it is that.

    PTX is neither asked for nor in the way, but no answer where machine code was promised.
    """
    want = ", ".join(sorted(promised)) or "no GPU code"
    for module in modules:
        have = sorted({str(target) for target in module if target.kind == fatbin.CUBIN})
        if have != sorted(promised) or not promised:
            shown = ", ".join(have or sorted(map(str, module))) or "an empty module"
            return f"holds {shown} where exactly {want} was promised"
    return ""
