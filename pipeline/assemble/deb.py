"""Opening a .deb without trusting it: an ar archive of two compressed tar archives.

dpkg reads plain tar headers and GNU's long names; so do we. Whatever dpkg would not accept
in a package is refused here too, before anything is written outside the scratch folder.
"""

from __future__ import annotations

import io
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from pipeline.assemble.entry import Entry, Slice, parents, path_fault
from pipeline.errors import CorruptArchive, HostileArchive, IndexBroken
from pipeline.files import os_errors_explained
from pipeline.lock.debian import read_stanza
from pipeline.oci.record import Kind
from pipeline.oci.tar_header import BLOCK, header_name, header_size, read_number

# Far above any package of Debian's, and still an end to what a bomb may write.
MAX_DATA_BYTES = 16 * 1024**3
MAX_CONTROL_BYTES = 64 * 1024**2
# dpkg's own strongest setting, xz -9, needs 65 MiB to unpack.
_MAX_XZ_MEMORY_BYTES = 128 * 1024**2
_MAX_NAME_BYTES = 4096
_MAX_ENTRIES = 1_000_000
_CHUNK_BYTES = 1024**2
# as Debian's policy has it
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{0,99}")
_AR_MAGIC = b"!<arch>\n"
_AR_HEADER_BYTES = 60
_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"1": Kind.HARDLINK,
    b"2": Kind.SYMLINK,
    b"5": Kind.DIR,
}
_LONG_TARGET, _LONG_NAME = b"K", b"L"


@dataclass(frozen=True, slots=True)
class DebContents:
    """What a .deb holds; file contents stay in the scratch file."""

    control: dict[str, str]
    control_text: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    offset: int
    size_bytes: int


def unpack(deb: Path, scratch: Path, *, limit_bytes: int = MAX_DATA_BYTES) -> DebContents:
    """Decompress a .deb's data into one scratch file and list what it holds."""
    data_tar = scratch / f"{deb.name}.data.tar"
    try:
        with os_errors_explained(scratch), deb.open("rb") as archive:
            version, control, data = _members(archive)
            _require_version(archive, version)
            control_text = _read_control(archive, control)
            # kept whole, as files are read from it when the layer is written
            with data_tar.open("wb") as out:
                out.writelines(_inflate(archive, data, limit_bytes))
        with data_tar.open("rb") as tar:
            entries = _checked(list(islice(_entries(tar, str(data_tar)), _MAX_ENTRIES + 1)))
        control_fields = read_stanza(control_text)
        _require_name(control_fields)
        return DebContents(control_fields, control_text, entries)
    except IndexBroken as error:
        raise CorruptArchive(f"{deb.name}: control file: {error}") from error
    except (CorruptArchive, HostileArchive) as error:
        raise type(error)(f"{deb.name}: {error}") from error


def _require_name(control: dict[str, str]) -> None:
    """Files of dpkg's are named after the package, so its name may be nothing but one."""
    name = control.get("Package", "")
    if not name:
        raise CorruptArchive("its control file names no package")
    if not _PACKAGE.fullmatch(name):
        raise HostileArchive(f"its control file names the package {name[:100]!r}")
    if any(field.lower() == "status" for field in control):
        raise HostileArchive("its control file has a Status field, which only dpkg may set")


def _members(archive: BinaryIO) -> list[_Member]:
    """The three members every .deb has, in their fixed order."""
    end = archive.seek(0, io.SEEK_END)
    archive.seek(0)
    if archive.read(len(_AR_MAGIC)) != _AR_MAGIC:
        raise CorruptArchive("not an ar archive")
    members: list[_Member] = []
    while (offset := archive.tell()) < end:
        if len(members) == 3:
            raise CorruptArchive(f"{end - offset} bytes follow the data archive")
        member = _member(archive.read(_AR_HEADER_BYTES), offset + _AR_HEADER_BYTES)
        if member.offset + member.size_bytes > end:
            raise CorruptArchive(f"{member.name} claims more bytes than the file has")
        members.append(member)
        # members begin at even offsets; the padding of the last one may be missing
        archive.seek(min(member.offset + member.size_bytes + member.size_bytes % 2, end))
    if [m.name.split(".")[0] for m in members] != ["debian-binary", "control", "data"]:
        raise CorruptArchive(f"not a .deb: it holds {[m.name for m in members]}")
    return members


def _member(header: bytes, offset: int) -> _Member:
    size = header[48:58].rstrip(b" ")
    if len(header) != _AR_HEADER_BYTES or header[58:] != b"`\n" or not size.isdigit():
        raise CorruptArchive("a header of the ar archive is damaged")
    name = header[:16].rstrip(b" ").removesuffix(b"/").decode("ascii", errors="replace")
    return _Member(name, offset, int(size))


def _require_version(archive: BinaryIO, member: _Member) -> None:
    archive.seek(member.offset)
    # deb(5): a higher minor version is to be read all the same
    if not archive.read(min(member.size_bytes, 16)).startswith(b"2."):
        raise CorruptArchive("not a .deb of format 2")


def _read_control(archive: BinaryIO, member: _Member) -> str:
    tar = io.BytesIO(b"".join(_inflate(archive, member, MAX_CONTROL_BYTES)))
    entries = {entry.path: entry for entry in _entries(tar, "")}
    # maintainer scripts lie beside it, and are never run
    if "control" not in entries:
        raise CorruptArchive("it has no control file")
    content = entries["control"].content
    if not isinstance(content, Slice):
        return ""
    tar.seek(content.offset)
    try:
        return tar.read(content.size_bytes).decode()
    except UnicodeDecodeError as error:
        raise CorruptArchive("control is not UTF-8") from error


class _Gzip:
    """zlib behind lzma's interface."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


class _Plain:
    """No compression at all, behind lzma's interface."""

    eof = False
    needs_input = True
    unused_data = b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        self.eof = not data
        return data


def _decompressor(name: str) -> lzma.LZMADecompressor | _Gzip | _Plain:
    packing = name.partition(".")[2]
    if packing == "tar.xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_XZ_MEMORY_BYTES)
    if packing == "tar.gz":
        return _Gzip()
    if packing == "tar":
        return _Plain()
    raise CorruptArchive(f"{name} is packed in a way that is not supported (only xz and gzip are)")


def _inflate(archive: BinaryIO, member: _Member, limit_bytes: int) -> Iterator[bytes]:
    """A member's content in small chunks; an error rather than more than the limit."""
    unpacker = _decompressor(member.name)
    archive.seek(member.offset)
    left, written = member.size_bytes, 0
    while not unpacker.eof:
        hungry = unpacker.needs_input
        # nothing is read while output waits: a bomb grows by one chunk at a time
        packed = archive.read(min(left, _CHUNK_BYTES)) if hungry else b""
        left -= len(packed)
        try:
            chunk = unpacker.decompress(packed, _CHUNK_BYTES)
        except (lzma.LZMAError, zlib.error) as error:
            raise CorruptArchive(f"{member.name} cannot be decompressed: {error}") from error
        # no input left, none produced, no end: the stream was cut off
        if hungry and not (packed or chunk or unpacker.eof):
            raise CorruptArchive(f"{member.name} ends too early")
        written += len(chunk)
        if written > limit_bytes:
            raise HostileArchive(f"{member.name} unpacks to more than {limit_bytes} bytes")
        yield chunk
    # another reader might unpack what is hidden there
    if left or unpacker.unused_data:
        raise CorruptArchive(f"bytes follow the end of {member.name}")


def _entries(tar: BinaryIO, tar_path: str) -> Iterator[Entry]:
    """Everything in a plain tar archive, read from its headers alone."""
    end = tar.seek(0, io.SEEK_END)
    offset, long_names = 0, dict[bytes, bytes]()
    while (header := _read_at(tar, offset, BLOCK)) != b"\0" * BLOCK:
        size, flag = header_size(header), header[156:157]
        offset += BLOCK
        if offset + size > end:
            raise CorruptArchive("a tar entry claims more bytes than the archive has")
        if flag in (_LONG_NAME, _LONG_TARGET):
            if size > _MAX_NAME_BYTES or flag in long_names:
                raise HostileArchive("a tar entry's long name is out of bounds")
            long_names[flag] = _read_at(tar, offset, size)
        else:
            entry = _entry(header, long_names, Slice(tar_path, offset, size))
            # `./`, the root itself, is in every package
            if entry.path:
                yield entry
            # a long name is for the entry right behind it
            long_names = {}
        offset += size + -size % BLOCK
    if long_names:
        raise CorruptArchive("a long name stands at the end of the tar archive")
    _require_zeros(tar, offset, end)


def _read_at(tar: BinaryIO, offset: int, size: int) -> bytes:
    tar.seek(offset)
    data = tar.read(size)
    if len(data) != size:
        raise CorruptArchive("the tar archive ends too early")
    return data


def _require_zeros(tar: BinaryIO, offset: int, end: int) -> None:
    # POSIX: two blocks of zeros end an archive
    if end - offset < 2 * BLOCK:
        raise CorruptArchive("the tar archive ends too early")
    tar.seek(offset)
    while chunk := tar.read(_CHUNK_BYTES):
        if chunk.count(0) != len(chunk):
            raise CorruptArchive("bytes follow the end of the tar archive")


def _entry(header: bytes, long_names: dict[bytes, bytes], content: Slice) -> Entry:
    name = long_names.get(_LONG_NAME) or header_name(header)
    target = _decoded(long_names.get(_LONG_TARGET) or header[157:257])
    path = _relative(_decoded(name))
    kind = _KINDS.get(header[156:157])
    if kind is None:
        raise HostileArchive(f"{path} is neither file, directory nor link")
    if kind is not Kind.FILE and content.size_bytes:
        raise CorruptArchive(f"{path} is not a file but has content")
    if kind is Kind.SYMLINK:
        _require_inside(path, target)
    elif kind is Kind.HARDLINK:
        target = _relative(target)
    else:
        target = ""
    return Entry(
        path=path,
        kind=kind,
        mode=read_number(header[100:108]) & 0o7777,
        content=content if kind is Kind.FILE else None,
        target=target,
        uid=read_number(header[108:116]),
        gid=read_number(header[116:124]),
    )


def _decoded(field: bytes) -> str:
    try:
        text = field.partition(b"\0")[0].decode()
    except UnicodeDecodeError as error:
        raise CorruptArchive(f"a name in the tar archive is not UTF-8: {field!r}") from error
    # such a name could steer a terminal, or hide what a listing shows
    if not text.isprintable():
        raise HostileArchive(f"a name in the tar archive has control characters: {text!r}")
    return text


def _relative(name: str) -> str:
    """`./usr/bin/` as `usr/bin`; the root itself as an empty path."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not name:
        raise HostileArchive(f"the path {name!r} leaves the package's root")
    path = "/".join(parts)
    if path and (fault := path_fault(path)):
        raise HostileArchive(f"the path {path[:200]!r} {fault}")
    return path


def _require_inside(path: str, target: str) -> None:
    """A link may start at the image's root, but not climb above it."""
    # counted by names alone: what lies behind other links is not known here
    depth = 0 if target.startswith("/") else path.count("/")
    for part in target.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            raise HostileArchive(f"the link {path} -> {target} leaves the image")
    if not target:
        raise CorruptArchive(f"the link {path} has no target")


def _checked(entries: list[Entry]) -> list[Entry]:
    """Judge entries by each other: each path once, nothing below a link or file, true links."""
    if len(entries) > _MAX_ENTRIES:
        raise HostileArchive(f"it holds more than {_MAX_ENTRIES} entries")
    kinds: dict[str, Kind] = {}
    for entry in entries:
        if entry.path in kinds:
            raise CorruptArchive(f"{entry.path} appears twice")
        kinds[entry.path] = entry.kind
    for entry in entries:
        for parent in parents(entry.path):
            if kinds.get(parent, Kind.DIR) is not Kind.DIR:
                raise HostileArchive(f"{entry.path} would be written through {parent}")
        # a link into another package would depend on the order of packages
        if entry.kind is Kind.HARDLINK and kinds.get(entry.target) is not Kind.FILE:
            raise HostileArchive(f"{entry.path} is a hard link to {entry.target}, no file in here")
    return entries
