"""A wheel, read with suspicion: its directory, its metadata, its RECORD."""

from __future__ import annotations

import base64
import csv
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from packaging.utils import (
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from pipeline.assemble.deflate import CHUNK_BYTES, inflate
from pipeline.assemble.entry import Deflated, Slice, path_fault
from pipeline.errors import CorruptArchive, HostileArchive

# The largest wheel of today's engines unpacks to under 3 GB.
UNPACKED_LIMIT_BYTES = 64 << 30
# The largest RECORD of today's engines is under 2 MB, the most files are some 20,000.
_SMALL_LIMIT_BYTES = 64 << 20
_MOST_MEMBERS = 500_000
# A second name for an entry, which some tools read and others do not.
_UNICODE_PATH = 0x7075
# sizes follow the data, as streaming writers leave them: APPNOTE.TXT 4.4.4
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
    """Read a wheel's directory and RECORD, refusing what no honest wheel holds."""
    try:
        project, version, _, _ = parse_wheel_filename(filename)
    except InvalidWheelFilename as error:
        raise CorruptArchive(f"{filename}: not a wheel's file name") from error
    members = _members(path, filename)
    dist_info = _dist_info(members, filename)
    _require_own_metadata(members, dist_info, filename, project, version)
    record = _record(members, dist_info, filename)
    return Wheel(filename, str(canonicalize_name(project)), dist_info, members, record)


def _members(path: Path, filename: str) -> dict[str, Member]:
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
            _check_name(info, filename)
            if info.filename in members:
                raise HostileArchive(f"{filename}: {info.filename!r} appears twice")
            members[info.filename] = _member(path, info, start, filename)
    if end > directory_start:
        raise CorruptArchive(f"{filename}: its last entry runs into the directory")
    if sum(i.file_size for i in infos) > UNPACKED_LIMIT_BYTES:
        raise HostileArchive(f"{filename}: unpacks to more than {UNPACKED_LIMIT_BYTES} bytes")
    return members


def _data_offset(handle: BinaryIO, info: zipfile.ZipInfo, filename: str) -> int:
    """Where an entry's bytes begin; its local header must agree with the directory."""
    handle.seek(info.header_offset)
    raw = handle.read(_LOCAL_HEADER.size)
    if len(raw) < _LOCAL_HEADER.size:
        raise CorruptArchive(f"{filename}: {info.filename!r} begins past the end of the file")
    magic, _, flags, method, _, _, *stated, name_length, extra_length = _LOCAL_HEADER.unpack(raw)
    name, extra = handle.read(name_length), handle.read(extra_length)
    is_same = method == info.compress_type and _agree(stated, flags, info)
    if magic != b"PK\x03\x04" or not is_same or len(extra) != extra_length:
        raise CorruptArchive(
            f"{filename}: the header of {info.filename!r} contradicts the directory"
        )
    # without the UTF-8 flag names are in the code page of the first PCs
    if name not in (info.orig_filename.encode(), info.orig_filename.encode("cp437", "replace")):
        raise HostileArchive(f"{filename}: {info.filename!r} has another name in its own header")
    if _UNICODE_PATH in _extra_kinds(info.extra) | _extra_kinds(extra):
        raise HostileArchive(f"{filename}: {info.filename!r} has a second name besides its own")
    return info.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


def _agree(stated: Sequence[int], flags: int, info: zipfile.ZipInfo) -> bool:
    """Whether CRC and sizes are those of the directory, where an entry's own header has them."""
    if flags & _HAS_DESCRIPTOR and not any(stated):
        return True
    crc, *sizes = stated
    pairs = zip(sizes, (info.compress_size, info.file_size), strict=True)
    return crc == info.CRC and all(a in (b, _IN_ZIP64) for a, b in pairs)


def _extra_kinds(extra: bytes) -> set[int]:
    """Which extra fields an entry has; what is damaged ends the list."""
    kinds, at = set(), 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        kinds.add(kind)
        at += 4 + length
    return kinds


def _check_name(info: zipfile.ZipInfo, filename: str) -> None:
    name = info.filename
    first = name.partition("/")[0]
    if name.startswith("/") or "\\" in name or not info.orig_filename.isprintable():
        raise HostileArchive(f"{filename}: entry name {name!r} is not a plain relative path")
    fault = "leaves its folder" if len(first) == 2 and first[1] == ":" else path_fault(name)
    if fault:
        raise HostileArchive(f"{filename}: entry name {name[:200]!r} {fault}")
    kind = stat.S_IFMT(info.external_attr >> 16)
    # zip files made on Windows have no Unix mode
    if kind not in (0, stat.S_IFREG):
        raise HostileArchive(f"{filename}: {name!r} is a link or a device, wheels hold files")
    if info.flag_bits & 0x1:
        raise CorruptArchive(f"{filename}: {name!r} is encrypted")


def _member(path: Path, info: zipfile.ZipInfo, start: int, filename: str) -> Member:
    mode = info.external_attr >> 16
    # the same rule as pip's
    executable = bool(mode and stat.S_ISREG(mode) and mode & 0o111)
    if info.compress_type == zipfile.ZIP_DEFLATED:
        data = Deflated(str(path), start, info.compress_size, info.file_size, info.CRC)
        return Member(info.filename, executable, data)
    if info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size:
        data_as_is = Slice(str(path), start, info.file_size, info.CRC)
        return Member(info.filename, executable, data_as_is)
    raise CorruptArchive(f"{filename}: {info.filename!r} is packed in a way wheels do not use")


def _dist_info(members: dict[str, Member], filename: str) -> str:
    tops = {n.split("/")[0] for n in members}
    infos = {top for top in tops if top.lower().endswith(".dist-info")}
    if len(infos) != 1:
        raise CorruptArchive(f"{filename}: holds {len(infos)} .dist-info folders, not one")
    name = infos.pop()
    for needed in ("METADATA", "RECORD", "WHEEL"):
        if f"{name}/{needed}" not in members:
            raise CorruptArchive(f"{filename}: has no {name}/{needed}")
    return name


def _require_own_metadata(
    members: dict[str, Member],
    dist_info: str,
    filename: str,
    project: NormalizedName,
    version: Version,
) -> None:
    """A wheel speaks of itself only: the same name and version in file, folder and METADATA."""
    name, _, number = dist_info.removesuffix(".dist-info").partition("-")
    if not _is_release(name, number, project, version):
        raise CorruptArchive(f"{filename}: its metadata folder is {dist_info}")
    head = read_member(members[f"{dist_info}/METADATA"]).replace(b"\r\n", b"\n")
    fields = [line.partition(b":") for line in head.partition(b"\n\n")[0].split(b"\n")]
    stated = [
        [v.strip().decode(errors="replace") for k, _, v in fields if k.lower() == field]
        for field in (b"name", b"version")
    ]
    if any(len(x) != 1 for x in stated) or not _is_release(
        stated[0][0], stated[1][0], project, version
    ):
        raise CorruptArchive(f"{filename}: its METADATA names another release")


def _is_release(name: str, number: str, project: NormalizedName, version: Version) -> bool:
    try:
        return canonicalize_name(name) == project and Version(number) == version
    except InvalidVersion:
        return False


def read_member(member: Member) -> bytes:
    """A small member's bytes, checked by size and CRC."""
    if member.content.size_bytes > _SMALL_LIMIT_BYTES:
        raise HostileArchive(
            f"{member.name}: {member.content.size_bytes} bytes are too many for such a file"
        )
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
    # PEP 427: RECORD cannot hash itself, nor the signatures over it
    unsigned = {f"{dist_info}/{n}" for n in ("RECORD", "RECORD.jws", "RECORD.p7s")}
    record: dict[str, str] = {}
    for name, promised in _rows(text, filename):
        digest = "" if name in unsigned else _hex(promised, name, filename)
        if record.setdefault(name, digest) != digest:
            raise CorruptArchive(f"{filename}: its RECORD contradicts itself about {name!r}")
    missing = sorted(set(record) - set(members) - unsigned)
    unlisted = sorted(set(members) - set(record) - unsigned)
    if missing:
        raise CorruptArchive(f"{filename}: its RECORD names {missing[0]!r}, which is not there")
    if unlisted:
        raise CorruptArchive(f"{filename}: {unlisted[0]!r} is not in its RECORD")
    return record


def _rows(text: str, filename: str) -> list[tuple[str, str]]:
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise CorruptArchive(f"{filename}: its RECORD is not readable ({error})") from error
    return [(row[0], row[1] if len(row) > 1 else "") for row in rows]


def _hex(promised: str, name: str, filename: str) -> str:
    algorithm, _, value = promised.partition("=")
    if algorithm != "sha256":
        how = f"with {algorithm}, not sha256" if algorithm else "with nothing"
        raise CorruptArchive(f"{filename}: RECORD hashes {name!r} {how}")
    try:
        # PEP 427 strips the padding
        digest = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except ValueError as error:
        raise CorruptArchive(f"{filename}: RECORD's hash of {name!r} is not base64") from error
    if len(digest) != sha256().digest_size:
        raise CorruptArchive(f"{filename}: RECORD's hash of {name!r} is not a sha256")
    return digest.hex()
