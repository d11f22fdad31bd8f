"""Opening a .deb without trusting it: an ar archive of two compressed tar archives.

dpkg reads plain tar headers and GNU's long names; so do we. Whatever dpkg would not accept in a
package is refused, too, before anything is written outside the scratch folder.
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
from typing import BinaryIO, NamedTuple

from pipeline.artifacts.oci.record import Kind
from pipeline.artifacts.oci.tar_reader import BLOCK, header_name, header_size, read_number
from pipeline.core.errors import CorruptArchive, HostileArchive, IndexBroken
from pipeline.core.files import os_errors_explained
from pipeline.images.assemble.layer import Entry, Slice, parents, path_fault
from pipeline.images.lock.debian import read_stanza

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
_KINDS = {b"1": Kind.HARDLINK, b"2": Kind.SYMLINK, b"5": Kind.DIR}
_KINDS |= dict.fromkeys((b"0", b"\0"), Kind.FILE)
_LONG_TARGET, _LONG_NAME = b"K", b"L"


@dataclass(frozen=True, slots=True)
class DebContents:
    """What a .deb holds; file contents stay in the scratch file."""

    control: dict[str, str]
    control_text: str
    entries: list[Entry]


class _Member(NamedTuple):
    name: str
    offset: int
    size_bytes: int


def unpack_deb(deb: Path, scratch: Path, *, limit_bytes: int = MAX_DATA_BYTES) -> DebContents:
    """Decompresses a .deb's data into one scratch file and lists what it holds."""
    data_tar = scratch / f"{deb.name}.data.tar"
    try:
        with os_errors_explained(scratch), deb.open("rb") as archive:
            version, control, data = _members(archive)
            archive.seek(version.offset)
            # deb(5): a higher minor version is to be read all the same
            if not archive.read(min(version.size_bytes, 16)).startswith(b"2."):
                raise CorruptArchive("not a .deb of format 2")
            control_tar = io.BytesIO(b"".join(_inflate(archive, control, MAX_CONTROL_BYTES)))
            # maintainer scripts lie beside the control file, and are never run
            listed = {entry.path: entry for entry in _entries(control_tar, "")}
            if "control" not in listed:
                raise CorruptArchive("it has no control file")
            content, text = listed["control"].content, ""
            try:
                if isinstance(content, Slice):
                    control_tar.seek(content.offset)
                    text = control_tar.read(content.size_bytes).decode()
                fields = read_stanza(text)
            except UnicodeDecodeError as error:
                raise CorruptArchive("control is not UTF-8") from error
            except IndexBroken as error:
                raise CorruptArchive(f"control file: {error}") from error
            # dpkg names files after the package, so its name may be nothing but a name
            name = fields.get("Package", "")
            if not name:
                raise CorruptArchive("its control file names no package")
            if not _PACKAGE.fullmatch(name):
                raise HostileArchive(f"its control file names the package {name[:100]!r}")
            if any(field.lower() == "status" for field in fields):
                raise HostileArchive("its control file has a Status field, which only dpkg may set")
            # stays whole: writing the layer reads files from it
            with data_tar.open("wb") as out:
                out.writelines(_inflate(archive, data, limit_bytes))
        with data_tar.open("rb") as tar:
            entries = list(islice(_entries(tar, str(data_tar)), _MAX_ENTRIES + 1))
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
                message = f"{entry.path} is a hard link to {entry.target}, no file in here"
                raise HostileArchive(message)
        return DebContents(fields, text, entries)
    except (CorruptArchive, HostileArchive) as error:
        raise type(error)(f"{deb.name}: {error}") from error


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
        header = archive.read(_AR_HEADER_BYTES)
        digits = header[48:58].rstrip(b" ")
        if len(header) != _AR_HEADER_BYTES or header[58:] != b"`\n" or not digits.isdigit():
            raise CorruptArchive("a header of the ar archive is damaged")
        name = header[:16].rstrip(b" ").removesuffix(b"/").decode("ascii", errors="replace")
        start, size = offset + _AR_HEADER_BYTES, int(digits)
        if start + size > end:
            raise CorruptArchive(f"{name} claims more bytes than the file has")
        members.append(_Member(name, start, size))
        # members begin at even offsets; the padding of the last one may be missing
        archive.seek(min(start + size + size % 2, end))
    if [m.name.split(".")[0] for m in members] != ["debian-binary", "control", "data"]:
        raise CorruptArchive(f"not a .deb: it holds {[m.name for m in members]}")
    return members


def _inflate(archive: BinaryIO, member: _Member, limit_bytes: int) -> Iterator[bytes]:
    """A member's content in small chunks; an error rather than more than the limit."""
    name, packing = member.name, member.name.partition(".")[2]
    if packing not in ("tar", "tar.gz", "tar.xz"):
        message = f"{name} is packed in a way that is not supported (only xz and gzip are)"
        raise CorruptArchive(message)
    xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_XZ_MEMORY_BYTES)
    gz = zlib.decompressobj(wbits=31)
    archive.seek(member.offset)
    remaining, written, is_done = member.size_bytes, 0, False
    while not is_done:
        hungry = xz.needs_input and not gz.unconsumed_tail
        # reads nothing while output waits: a bomb grows by one chunk at a time
        packed = chunk = archive.read(min(remaining, _CHUNK_BYTES)) if hungry else b""
        remaining -= len(packed)
        try:
            if packing == "tar.xz":
                chunk = xz.decompress(packed, _CHUNK_BYTES)
            elif packing == "tar.gz":
                chunk = gz.decompress(gz.unconsumed_tail + packed, _CHUNK_BYTES)
        except (lzma.LZMAError, zlib.error) as error:
            raise CorruptArchive(f"{name} cannot be decompressed: {error}") from error
        is_done = xz.eof or gz.eof or (packing == "tar" and not packed)
        # no input remaining, none produced, no end: the stream was cut off
        if hungry and not (packed or chunk or is_done):
            raise CorruptArchive(f"{name} ends too early")
        written += len(chunk)
        if written > limit_bytes:
            raise HostileArchive(f"{name} unpacks to more than {limit_bytes} bytes")
        yield chunk
    # another reader might unpack what is hidden there
    if remaining or xz.unused_data or gz.unused_data:
        raise CorruptArchive(f"bytes follow the end of {name}")


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
            # a long name is for the very next entry
            long_names = {}
        offset += size + -size % BLOCK
    if long_names:
        raise CorruptArchive("a long name stands at the end of the tar archive")
    # POSIX: two blocks of zeros end an archive
    if end - offset < 2 * BLOCK:
        raise CorruptArchive("the tar archive ends too early")
    tar.seek(offset)
    while chunk := tar.read(_CHUNK_BYTES):
        if chunk.count(0) != len(chunk):
            raise CorruptArchive("bytes follow the end of the tar archive")


def _read_at(tar: BinaryIO, offset: int, size: int) -> bytes:
    tar.seek(offset)
    data = tar.read(size)
    if len(data) != size:
        raise CorruptArchive("the tar archive ends too early")
    return data


def _entry(header: bytes, long_names: dict[bytes, bytes], content: Slice) -> Entry:
    target = _decoded(long_names.get(_LONG_TARGET) or header[157:257])
    path = _relative(_decoded(long_names.get(_LONG_NAME) or header_name(header)))
    kind = _KINDS.get(header[156:157])
    if kind is None:
        raise HostileArchive(f"{path} is neither file, directory nor link")
    if kind is not Kind.FILE and content.size_bytes:
        raise CorruptArchive(f"{path} is not a file but has content")
    if kind is Kind.SYMLINK:
        # a link may start at the image's root, but not lead above it; counted by names alone:
        # where other links lead is not known yet
        depth = 0 if target.startswith("/") else path.count("/")
        for part in target.split("/"):
            depth += -1 if part == ".." else part not in ("", ".")
            if depth < 0:
                raise HostileArchive(f"the link {path} -> {target} leaves the image")
        if not target:
            raise CorruptArchive(f"the link {path} has no target")
    else:
        target = _relative(target) if kind is Kind.HARDLINK else ""
    mode, uid, gid = (read_number(header[at : at + 8]) for at in (100, 108, 116))
    data = content if kind is Kind.FILE else None
    return Entry(path, kind, mode & 0o7777, data, target, uid, gid)


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
