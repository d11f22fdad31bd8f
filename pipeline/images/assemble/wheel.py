"""A wheel, read with suspicion: its directory, its metadata, its RECORD."""

from __future__ import annotations

import base64
import csv
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from pipeline.core.errors import CorruptArchive, HostileArchive
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.images.assemble.deflate import CHUNK_BYTES, inflate
from pipeline.images.assemble.layer import Deflated, Slice, path_fault
from pipeline.images.lock.model import split_variant

# The largest wheel of today's engines unpacks to under 3 GB.
UNPACKED_LIMIT_BYTES = 64 << 30
# The largest RECORD of today's engines is under 2 MB, the most files are some 20,000.
_SMALL_LIMIT_BYTES = 64 << 20
_MOST_MEMBERS = 500_000
# A second name for an entry, which some tools read and others do not.
_UNICODE_PATH = 0x7075
# sizes follow the data, as streaming writers put them: APPNOTE.TXT 4.4.4
_HAS_DESCRIPTOR = 0x8
# the true size is in an extra field: APPNOTE.TXT 4.4.8
_IN_ZIP64 = 0xFFFFFFFF
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel: its name, whether it may be executed, where its bytes lie."""

    name: str
    executable: bool
    content: Deflated | Slice


@dataclass(frozen=True, slots=True)
class Wheel:
    """An opened wheel whose directory has been checked; its contents are checked on use."""

    filename: str
    project: str
    dist_info: str
    members: dict[str, Member]
    record: dict[str, str]  # path -> hex sha256, as its RECORD promises


def open_wheel(path: Path, filename: str) -> Wheel:
    """Reads a wheel's directory and RECORD, refusing what no honest wheel holds."""
    plain, label = split_variant(filename)
    try:
        project, version, _, _ = parse_wheel_filename(plain)
    except InvalidWheelFilename as error:
        raise CorruptArchive(f"{filename}: not a wheel's file name") from error
    members = _members(path, filename)
    tops = {n.split("/")[0] for n in members}
    infos = {top for top in tops if top.lower().endswith(".dist-info")}
    if len(infos) != 1:
        raise CorruptArchive(f"{filename}: holds {len(infos)} .dist-info folders, not one")
    dist_info = infos.pop()
    for needed in ("METADATA", "RECORD", "WHEEL"):
        if f"{dist_info}/{needed}" not in members:
            raise CorruptArchive(f"{filename}: has no {dist_info}/{needed}")

    if label:
        # PEP 825: a variant says inside what its label stands for; another label is another wheel
        variant = members.get(f"{dist_info}/variant.json")
        try:
            known = read_json(read_member(variant), most_bytes=1 << 20) if variant else {}
            is_known = label in known["variants"]
        except (JsonInvalid, KeyError, TypeError):
            is_known = False
        if not is_known:
            raise CorruptArchive(f"{filename}: its variant.json knows no variant {label!r}")

    def is_own(name: str, number: str) -> bool:
        try:
            return canonicalize_name(name) == project and Version(number) == version
        except InvalidVersion:
            return False

    # a wheel describes itself only: the same name and version in file, folder and METADATA
    name, _, number = dist_info.removesuffix(".dist-info").partition("-")
    if not is_own(name, number):
        raise CorruptArchive(f"{filename}: its metadata folder is {dist_info}")
    head = read_member(members[f"{dist_info}/METADATA"]).replace(b"\r\n", b"\n")
    fields = [line.partition(b":") for line in head.partition(b"\n\n")[0].split(b"\n")]
    names, numbers = (
        [v.strip().decode(errors="replace") for k, _, v in fields if k.lower() == field]
        for field in (b"name", b"version")
    )
    if len(names) != 1 or len(numbers) != 1 or not is_own(names[0], numbers[0]):
        raise CorruptArchive(f"{filename}: its METADATA names another release")
    record = _record(members, dist_info, filename)
    return Wheel(filename, str(canonicalize_name(project)), dist_info, members, record)


def _members(path: Path, filename: str) -> dict[str, Member]:
    """The files of the zip; no two entries share bytes or names."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos, directory_start = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise CorruptArchive(f"{filename}: not a readable zip archive ({error})") from error
    if len(infos) > _MOST_MEMBERS:
        raise HostileArchive(f"{filename}: holds more than {_MOST_MEMBERS} entries")
    members: dict[str, Member] = {}
    end = 0
    with path.open("rb") as handle:
        for info in sorted(infos, key=lambda i: i.header_offset):
            # two entries over the same bytes are how zip bombs reach petabytes
            if info.header_offset < end:
                raise HostileArchive(f"{filename}: {info.filename!r} overlaps another entry")
            start = _data_offset(handle, info, filename)
            end = start + info.compress_size
            if info.is_dir():
                continue
            # a plain file with a plain relative name, packed as wheels pack them
            name, mode = info.filename, info.external_attr >> 16
            what, first = f"{filename}: {name!r}", name.partition("/")[0]
            if name.startswith("/") or "\\" in name or not info.orig_filename.isprintable():
                message = f"{filename}: entry name {name!r} is not a plain relative path"
                raise HostileArchive(message)
            fault = path_fault(name)
            if len(first) == 2 and first[1] == ":":
                fault = "leaves its folder"
            if fault:
                raise HostileArchive(f"{filename}: entry name {name[:200]!r} {fault}")
            # zip files made on Windows have no Unix mode
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise HostileArchive(f"{what} is a link or a device, wheels hold files")
            if info.flag_bits & 0x1:
                raise CorruptArchive(f"{what} is encrypted")
            content: Deflated | Slice
            if info.compress_type == zipfile.ZIP_DEFLATED:
                content = Deflated(str(path), start, info.compress_size, info.file_size, info.CRC)
            elif info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size:
                content = Slice(str(path), start, info.file_size, info.CRC)
            else:
                raise CorruptArchive(f"{what} is packed in a way wheels do not use")
            if name in members:
                raise HostileArchive(f"{what} appears twice")
            # the same rule as pip's
            executable = bool(mode and stat.S_ISREG(mode) and mode & 0o111)
            members[name] = Member(name, executable, content)
    if end > directory_start:
        raise CorruptArchive(f"{filename}: its last entry runs into the directory")
    if sum(i.file_size for i in infos) > UNPACKED_LIMIT_BYTES:
        raise HostileArchive(f"{filename}: unpacks to more than {UNPACKED_LIMIT_BYTES} bytes")
    return members


def _data_offset(handle: BinaryIO, info: zipfile.ZipInfo, filename: str) -> int:
    """Where an entry's bytes begin; its local header must agree with the directory."""
    what = f"{filename}: {info.filename!r}"
    handle.seek(info.header_offset)
    raw = handle.read(_LOCAL_HEADER.size)
    if len(raw) < _LOCAL_HEADER.size:
        raise CorruptArchive(f"{what} begins past the end of the file")
    magic, _, flags, method, _, _, crc, *sizes, n_name, n_extra = _LOCAL_HEADER.unpack(raw)
    name, extra = handle.read(n_name), handle.read(n_extra)
    pairs = zip(sizes, (info.compress_size, info.file_size), strict=True)
    is_same = crc == info.CRC and all(a in (b, _IN_ZIP64) for a, b in pairs)
    # CRC and sizes may follow the data: then the header has none
    is_same = is_same or bool(flags & _HAS_DESCRIPTOR and not any((crc, *sizes)))
    is_same = is_same and method == info.compress_type and magic == b"PK\x03\x04"
    if not is_same or len(extra) != n_extra:
        message = f"{filename}: the header of {info.filename!r} contradicts the directory"
        raise CorruptArchive(message)
    # without the UTF-8 flag names are in the code page of the first PCs
    if name not in (info.orig_filename.encode(), info.orig_filename.encode("cp437", "replace")):
        raise HostileArchive(f"{what} has another name in its own header")
    for fields in (info.extra, extra):
        at = 0
        # a damaged field ends the list
        while at + 4 <= len(fields):
            kind, length = struct.unpack_from("<HH", fields, at)
            at += 4 + length
            if kind == _UNICODE_PATH:
                raise HostileArchive(f"{what} has a second name besides its own")
    return info.header_offset + _LOCAL_HEADER.size + int(n_name) + int(n_extra)


def read_member(member: Member) -> bytes:
    """A small member's bytes, checked by size and CRC."""
    n_bytes = member.content.size_bytes
    if n_bytes > _SMALL_LIMIT_BYTES:
        raise HostileArchive(f"{member.name}: {n_bytes} bytes are too many for such a file")
    return b"".join(read_chunks(member))


def read_chunks(member: Member) -> Iterator[bytes]:
    """A member's bytes in pieces; an error at the end if their CRC is wrong."""
    content, crc = member.content, 0
    packed_bytes = content.size_bytes if isinstance(content, Slice) else content.packed_bytes
    with Path(content.path).open("rb") as handle:
        handle.seek(content.offset)
        sizes = [CHUNK_BYTES] * (packed_bytes // CHUNK_BYTES) + [packed_bytes % CHUNK_BYTES]
        pieces: Iterator[bytes] = (handle.read(size) for size in sizes)
        if isinstance(content, Deflated):
            pieces = inflate(pieces, content.size_bytes, member.name)
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            yield piece
    if crc != content.crc32:
        raise CorruptArchive(f"{member.name}: its CRC is wrong")


def _record(members: dict[str, Member], dist_info: str, filename: str) -> dict[str, str]:
    """What RECORD promises; it must name exactly the files that are there."""
    text = read_member(members[f"{dist_info}/RECORD"]).decode("utf-8", "replace")
    try:
        rows = [[*row, ""] for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise CorruptArchive(f"{filename}: its RECORD is not readable ({error})") from error
    # PEP 427: RECORD cannot hash itself, nor the signatures over it
    unsigned = {f"{dist_info}/{n}" for n in ("RECORD", "RECORD.jws", "RECORD.p7s")}
    record: dict[str, str] = {}
    for name, promised, *_ in rows:
        digest, (algorithm, _, value) = b"", promised.partition("=")
        if name not in unsigned:
            if algorithm != "sha256":
                how = f"with {algorithm}, not sha256" if algorithm else "with nothing"
                raise CorruptArchive(f"{filename}: RECORD hashes {name!r} {how}")
            try:
                # PEP 427 strips the padding
                digest = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
            except ValueError as error:
                message = f"RECORD's hash of {name!r} is not base64"
                raise CorruptArchive(f"{filename}: {message}") from error
            if len(digest) != sha256().digest_size:
                raise CorruptArchive(f"{filename}: RECORD's hash of {name!r} is not a sha256")
        if record.setdefault(name, digest.hex()) != digest.hex():
            raise CorruptArchive(f"{filename}: its RECORD contradicts itself about {name!r}")
    for name in sorted(set(record) - set(members) - unsigned):
        raise CorruptArchive(f"{filename}: its RECORD names {name!r}, which is not there")
    for name in sorted(set(members) - set(record) - unsigned):
        raise CorruptArchive(f"{filename}: {name!r} is not in its RECORD")
    return record
