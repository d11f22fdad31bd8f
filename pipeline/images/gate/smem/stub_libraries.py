"""Stubs for the CUDA libraries that torch names but the gate never calls.

`import torch` needs every library that torch was linked with to load: four gigabytes of machine
code for GPUs, of which a gate that only carries CPU tensors runs not one instruction. A stub
has the right name and the right symbols in the right versions, and each of them is a function that
returns an error. So torch itself stays the image's own.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from pipeline.core.errors import GateEnvironment

_DT_NULL, _DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ = 0, 1, 4, 5, 6, 7, 8
_DT_RELAENT, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 9, 10, 11, 14
_DT_VERSYM, _DT_VERDEF, _DT_VERDEFNUM = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED, _SHT_VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_READ, _WRITE, _EXECUTE = 4, 2, 1
_SEGMENTS = 4
_PAGE = 0x10000  # the largest page size of the machines we know
_TYPE_INFO = "_ZTI"
_OBJECTS = (_TYPE_INFO, "_ZTV", "_ZTT", "_ZTS")
_RELATIVE = {62: 8, 183: 1027}  # the relocation that adds the load address, by machine
# Where a vtable or another object is expected there is room enough for one.
_SLOT_BYTES = 64
# What every function returns the address of: zeros that a caller may also write to.
_SCRATCH_BYTES = 4096
_X86_64, _AARCH64 = 62, 183


@dataclass
class Links:
    """What a shared object asks of others, and what it offers."""

    machine: int
    needed: list[str] = field(default_factory=list)
    wanted: set[tuple[str, str, str]] = field(default_factory=set)  # library, version, symbol
    offered: set[str] = field(default_factory=set)


def read_links(path: Path) -> Links | None:
    """The dynamic links of a 64-bit little-endian ELF file; none for any other file."""
    if not path.is_file() or path.stat().st_size < 64:
        return None
    try:
        # a library of torch has gigabytes, its tables a few megabytes
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:6] != b"\x7fELF\x02\x01":
                return None

            def stretch(at: int, size: int) -> bytes:
                if at + size > len(data):
                    raise ValueError("a table lies outside the file")
                return data[at : at + size]

            links = Links(*struct.unpack_from("<H", data, 18))
            size, count = struct.unpack_from("<HH", data, 58)
            (at,) = struct.unpack_from("<Q", data, 40)
            table = stretch(at, size * count)
            sections = [struct.unpack_from("<IIQQQQIIQQ", table, size * i) for i in range(count)]
            # of every kind the first section's bytes, and those of the strings that it names
            read = {
                section[1]: (stretch(*section[4:6]), stretch(*sections[section[6]][4:6]))
                for section in reversed(sections)
                if section[1] in (_SHT_DYNSYM, _SHT_VERSYM, _SHT_VERNEED, _SHT_DYNAMIC)
            }
        dynamic, dynamic_names = read.get(_SHT_DYNAMIC, (b"", b""))
        for tag, value in struct.iter_unpack("<QQ", dynamic):
            if tag == _DT_NULL:
                break
            if tag == _DT_NEEDED:
                links.needed.append(_text(dynamic_names, value))
        by_index: dict[int, tuple[str, str]] = {}  # library and version of each number
        needs, texts = read.get(_SHT_VERNEED, (b"", b""))
        at = 0
        while needs:
            _, count, library_at, first, following = struct.unpack_from("<HHIII", needs, at)
            inner = at + first
            for _ in range(count):
                _, _, index, label_at, after = struct.unpack_from("<IHHII", needs, inner)
                # the highest bit marks a hidden symbol
                by_index[index & 0x7FFF] = (_text(texts, library_at), _text(texts, label_at))
                inner += after
            if not following:
                break
            at += following
        (symbols, names), (versions, _) = (
            read.get(kind, (b"", b"")) for kind in (_SHT_DYNSYM, _SHT_VERSYM)
        )
        for i, (name, info, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", symbols)):
            if name and section:
                links.offered.add(_text(names, name))
            elif name and info >> 4 == 1:  # global; a weak symbol may stay undefined
                version = struct.unpack_from("<H", versions, 2 * i)[0] & 0x7FFF if versions else 1
                library, label = by_index.get(version, ("", ""))
                links.wanted.add((library, label, _text(names, name)))
    except (struct.error, IndexError, ValueError) as error:
        raise GateEnvironment(
            f"{path.name}: its ELF tables are damaged or cut off ({error})",
            "The library comes from a wheel of the lock: fetch it again, or lock another build.",
        ) from error
    return links


def _text(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode("ascii", "replace")


def make_stubs(libraries: Sequence[Path], system: Sequence[Path], folder: Path) -> list[str]:
    """Writes what the libraries miss into a folder; returns the names of what it wrote.

    `system` are the libraries that come with the interpreter, under the names they load by.
    """
    read = {path.name: links for path in libraries if (links := read_links(path))}
    around = {path.name: links for path in system if (links := read_links(path))}
    missing = sorted({n for links in read.values() for n in links.needed} - {*read, *around})
    offered = {name for links in (*read.values(), *around.values()) for name in links.offered}
    symbols: dict[str, set[tuple[str, str]]] = {name: set() for name in missing}
    # what carries no version does not say whose it is, so every stub has it
    orphans: set[tuple[str, str]] = set()
    for links in read.values():
        for library, version, symbol in links.wanted:
            if library in symbols:
                symbols[library].add((version, symbol))
            elif not library and symbol not in offered:
                orphans.add(("", symbol))
    folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        machine = next(iter(read.values())).machine
        (folder / name).write_bytes(shared_object(name, sorted(symbols[name] | orphans), machine))
    return missing


def shared_object(soname: str, symbols: Sequence[tuple[str, str]], machine: int) -> bytes:
    """Writes an ELF shared object with these (version, symbol) pairs.

    Functions fail when they are called. Objects are zeros, but for C++ type descriptions, which
    must say their name: pybind11 asks for it while it registers classes.
    """
    count = len(symbols)
    versions = sorted({version for version, _ in symbols if version})
    # every text once, and where each begins
    texts = list(dict.fromkeys([soname, *(symbol for _, symbol in symbols), *versions]))
    begins = dict(zip(texts, accumulate((len(t) + 1 for t in texts), initial=1), strict=False))
    strings = b"\0" + b"".join(text.encode() + b"\0" for text in texts)
    definitions = b""
    # the file's own name as version 1, then each version that symbols carry
    for i, name in enumerate([soname, *versions]):
        following = 28 if i < len(versions) else 0
        definitions += struct.pack(
            "<HHHHIIIII", 1, i == 0, i + 1, 1, _elf_hash(name), 20, following, begins[name], 0
        )
    # 0 is for local symbols and 1 for the file's own name
    index = {version: i + 2 for i, version in enumerate(versions)}
    numbers = [0, *(index.get(version, 1) for version, _ in symbols)]
    described = [i for i, (_, symbol) in enumerate(symbols) if symbol.startswith(_TYPE_INFO)]
    # System V's hash table, a bucket for each symbol; index 0 means none. The old form of table:
    # simpler than GNU's, and the loader reads both
    size = len(symbols) + 1
    buckets, chains = [0] * size, [0] * size
    for i, (_, symbol) in enumerate(symbols, start=1):
        bucket = _elf_hash(symbol) % size
        chains[i], buckets[bucket] = buckets[bucket], i
    pieces = {
        "symbols": bytes(24 * (count + 1)),
        "hash": struct.pack(f"<{2 + 2 * size}I", size, size, *buckets, *chains),
        "versym": struct.pack(f"<{count + 1}H", *numbers),
        "verdef": definitions,
        "strings": strings,
        "moves": bytes(24 * len(described)),
        "dynamic": bytes(16 * 13),
        "objects": bytes(_SLOT_BYTES * count),
        "scratch": bytes(_SCRATCH_BYTES),
    }
    # the sizes are known, so every address is, before the tables of addresses are filled in
    at, last = dict[str, int](), 64 + 56 * _SEGMENTS
    for name, piece in pieces.items():
        at[name] = _aligned(last, 16)
        last = at[name] + len(piece)
    code = _aligned(last, _PAGE)
    end = code + _SLOT_BYTES * count

    table, moves = bytes(24), b""
    for i, (_, symbol) in enumerate(symbols):
        is_object = symbol.startswith(_OBJECTS)
        address = (at["objects"] if is_object else code) + _SLOT_BYTES * i
        # global, object or function; no section table is there to contradict section 1
        kind = 0x11 if is_object else 0x12
        table += struct.pack("<IBBHQQ", begins[symbol], kind, 0, 1, address, _SLOT_BYTES)
    for i in described:
        shown = at["strings"] + begins[symbols[i][1]] + len(_TYPE_INFO)
        slot = at["objects"] + _SLOT_BYTES * i + 8
        moves += struct.pack("<QQQ", slot, _RELATIVE[machine], shown)
    tags = [
        *((_DT_SONAME, begins[soname]), (_DT_HASH, at["hash"]), (_DT_STRTAB, at["strings"])),
        *((_DT_SYMTAB, at["symbols"]), (_DT_STRSZ, len(strings)), (_DT_SYMENT, 24)),
        *((_DT_VERSYM, at["versym"]), (_DT_VERDEF, at["verdef"])),
        *((_DT_VERDEFNUM, len(versions) + 1), (_DT_RELA, at["moves"])),
        *((_DT_RELASZ, len(moves)), (_DT_RELAENT, 24), (_DT_NULL, 0)),
    ]
    pieces |= {"symbols": table, "moves": moves}
    pieces["dynamic"] = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, _SEGMENTS, 64, 0, 0
    )
    for kind, flags, start, size, alignment in (
        (_PT_LOAD, _READ | _WRITE, 0, code, _PAGE),
        (_PT_LOAD, _READ | _EXECUTE, code, end - code, _PAGE),
        (_PT_DYNAMIC, _READ | _WRITE, at["dynamic"], len(pieces["dynamic"]), 8),
        # without it the loader wants an executable stack, which hardened systems refuse
        (_PT_GNU_STACK, _READ | _WRITE, 0, 0, 16),
    ):
        head += struct.pack("<IIQQQQQQ", kind, flags, start, start, start, size, size, alignment)
    out = bytearray(head.ljust(end, b"\0"))
    for name, piece in pieces.items():
        out[at[name] : at[name] + len(piece)] = piece
    for slot in range(code, end, _SLOT_BYTES):
        out[slot : slot + _SLOT_BYTES] = _returning(at["scratch"], slot, machine)
    return bytes(out)


def _returning(scratch: int, here: int, machine: int) -> bytes:
    """Machine code that returns the scratch area's address: as a number an error, as a pointer
    something to read and to write (torch keeps a callback in what one of them returns)."""
    distance = scratch - here
    if machine == _X86_64:  # lea rax, [rip + distance]; ret
        code = b"\x48\x8d\x05" + struct.pack("<i", distance - 7) + b"\xc3"
    else:  # adr x0, distance; ret
        bits = distance & 0x1FFFFF
        code = struct.pack("<I", 0x10000000 | (bits & 3) << 29 | bits >> 2 << 5)
        code += bytes.fromhex("c0035fd6")
    return code.ljust(_SLOT_BYTES, b"\0")


def _elf_hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


def _aligned(number: int, step: int) -> int:
    return -(-number // step) * step
