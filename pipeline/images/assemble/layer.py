"""Entries → one layer blob: tar in gzip members, with its digest, diffID and table of contents.

Each file is one gzip member: its squeezed tar header, then the deflate stream that the wheel
already holds. Nothing is recompressed; everything is inflated once, which yields the diffID, checks
each CRC and RECORD hash, and records where in the blob each file begins, so that a single file can
be read back later without unpacking the layer.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord, WrittenLayer
from pipeline.artifacts.oci.tar_reader import END, MTIME, padding
from pipeline.core.errors import CorruptArchive, HostileArchive, StoreDamaged
from pipeline.images.assemble import deflate
from pipeline.images.assemble.deflate import CHUNK_BYTES, trailer

# What every Linux file system allows; the path less the prefix that engines add when they unpack.
_LONGEST_NAME_BYTES = 255
_LONGEST_PATH_BYTES = 4096 - 256
# Today's deepest path has some 20 parts; each costs a lookup of every folder above it.
_MOST_PARTS = 500
# What helps with a file that differs from its wheel's RECORD.
WRONG_RECORD = (
    "Nothing was kept. If it was published so, name the wheel under `python: rewrite_record:`, with"
    " the reason; else lock another version."
)
_FLAGS = {Kind.FILE: b"0", Kind.HARDLINK: b"1", Kind.SYMLINK: b"2", Kind.DIR: b"5"}
# The first numbers that have too many octal digits for their field.
_SIZE_LIMIT, _ID_LIMIT = 8**11, 8**7


@dataclass(frozen=True, slots=True)
class Slice:
    """Uncompressed bytes inside a file on disk."""

    path: str
    offset: int
    size_bytes: int
    crc32: int | None = None  # where the archive states one


@dataclass(frozen=True, slots=True)
class Deflated:
    """A raw deflate stream inside a file on disk: a zip member, or a file of a finished layer."""

    path: str
    offset: int
    packed_bytes: int
    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a layer: a directory, a file, a symbolic link or a hard link."""

    path: str  # relative, no leading or trailing slash: "usr/bin/python3.11"
    kind: Kind
    mode: int
    content: bytes | Slice | Deflated | None = None
    target: str = ""
    uid: int = 0
    gid: int = 0
    owner: str = ""  # the wheel or .deb it comes from, for people and for `prefer`
    sha256: str = ""  # what a RECORD promises (hex); checked while the layer is written

    @property
    def size_bytes(self) -> int:
        """How many bytes a file has when it is unpacked."""
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.size_bytes if self.content else 0


def link_to(path: str, target: str) -> Entry:
    """A symbolic link."""
    return Entry(path, Kind.SYMLINK, 0o777, target=target)


def path_fault(path: str) -> str:
    """Why a layer cannot hold a path; empty for a good one."""
    if len(path.encode(errors="replace")) > _LONGEST_PATH_BYTES:
        return "is too long for a path"
    parts = path.split("/")
    if len(parts) > _MOST_PARTS:
        return "has too many folders above it"
    for part in parts:
        if part in ("", ".", ".."):
            return "leaves its folder"
        # https://github.com/opencontainers/image-spec/blob/main/layer.md#whiteouts
        if part.startswith(".wh."):
            return "would delete other files when it is unpacked"
        if len(part.encode(errors="replace")) > _LONGEST_NAME_BYTES:
            return "has a name that is too long for a file"
    return ""


def parents(path: str) -> Iterator[str]:
    """Every directory above a path, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def with_parents(entries: list[Entry]) -> list[Entry]:
    """Sorts entries by path and adds every missing parent directory."""
    known = {e.path: e for e in entries}
    for entry in entries:
        for parent in parents(entry.path):
            known.setdefault(parent, Entry(path=parent, kind=Kind.DIR, mode=0o755))
    # a folder sorts before its contents; the order is part of the digest
    return [known[path] for path in sorted(known)]


def tar_header(entry: Entry, size_bytes: int) -> bytes:
    """The header of one entry, with a pax record only where ustar cannot express it."""
    path, target = entry.path.encode(), entry.target.encode()
    path += b"/" if entry.kind is Kind.DIR else b""
    prefix, name, records = b"", path, dict[str, bytes]()
    if len(path) > 100:
        # the longest prefix that fits: one rule, as the split is part of the digest
        at = path.rfind(b"/", 1, min(156, len(path) - 1))
        prefix, name = path[: max(at, 0)], path[at + 1 :]
    # ustar has no encoding: readers guess at bytes beyond ASCII, pax is UTF-8
    if len(name) > 100 or not path.isascii():
        records["path"] = path
        prefix, name = b"", path[:100].decode(errors="ignore").encode()
    if len(target) > 100 or not target.isascii():
        records["linkpath"] = target
        target = target[:100].decode(errors="ignore").encode()
    numbers = {"size": (size_bytes, _SIZE_LIMIT)}
    numbers |= {"uid": (entry.uid, _ID_LIMIT), "gid": (entry.gid, _ID_LIMIT)}
    records |= {key: b"%d" % n for key, (n, limit) in numbers.items() if n >= limit}
    size, uid, gid = (n if n < limit else 0 for n, limit in numbers.values())
    block = _block(name, _FLAGS[entry.kind], entry.mode, size, uid, gid, target, prefix)
    if not records:
        return block
    body = b""
    for key, value in sorted(records.items()):
        # `LENGTH key=value`: LENGTH counts itself, and one more digit can make it one longer
        rest = b" %s=%s\n" % (key.encode(), value)
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length = len(str(length)) + len(rest)
        body += b"%d%s" % (length, rest)
    head = _block(b"././@PaxHeader", b"x", 0o644, len(body), 0, 0, b"", b"")
    return head + body + padding(len(body)) + block


def _block(
    name: bytes, flag: bytes, mode: int, size: int, uid: int, gid: int, target: bytes, prefix: bytes
) -> bytes:
    block = name.ljust(100, b"\0")
    block += b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, MTIME)
    # the checksum counts its own field as blanks
    block += b" " * 8 + flag + target.ljust(100, b"\0") + b"ustar\x0000"
    # no user and group names: numbers decide; no device numbers
    block += b"\0" * 80 + prefix.ljust(155, b"\0") + b"\0" * 12
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


# A wheel has thousands of small files: hashed and written one by one, the calls are the work.
_FLUSH_BYTES = 1 << 20
# Folders and links have no content; so many bytes of headers wait for the next file's member.
_PENDING_BYTES = 1 << 15
_LONGEST_TARGET_BYTES = 4095  # PATH_MAX without the closing NUL
_TRAILER_BYTES = 8  # CRC-32 and size, RFC 1952
# More than what compression adds to a piece that does not shrink, with a header and a trailer.
_SLACK_BYTES = 4096
# bounds the memory that one file costs, however well it was packed
_STEP_BYTES = 4 << 20


class _HashedSink:
    """Collects small writes; hashes, counts and passes them on in large ones."""

    def __init__(self, out: BinaryIO | None) -> None:
        self._out, self._hash, self._buffer = out, hashlib.sha256(), bytearray()
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        self.size_bytes += len(data)
        self._buffer += data
        if len(self._buffer) >= _FLUSH_BYTES:
            self.digest()

    def digest(self) -> str:
        self._hash.update(self._buffer)
        if self._out is not None:
            self._out.write(self._buffer)
        self._buffer.clear()
        return "sha256:" + self._hash.hexdigest()


class _LayerWriter:
    """Writes entries, which must come sorted, to one blob."""

    def __init__(self, out: BinaryIO) -> None:
        self.blob, self.tar = _HashedSink(out), _HashedSink(None)
        self.pending = bytearray()  # tar bytes that wait for the next member
        self.reading = ExitStack()  # the files that entries come from
        self._files: dict[str, BinaryIO] = {}

    def add(self, entry: Entry) -> FileRow:
        """Appends one entry."""
        # the last check of a path, wherever it came from, before it is part of a layer
        fault = path_fault(entry.path)
        if not fault and len(entry.target.encode(errors="replace")) > _LONGEST_TARGET_BYTES:
            fault = "is a link to a path that is too long"
        if fault:
            raise HostileArchive(f"{entry.owner or 'the image'}: /{entry.path[:200]} {fault}")
        content, size = entry.content or b"", entry.size_bytes
        sha, crc, offset = hashlib.sha256(), 0, 0  # offset: where in the blob its bytes begin
        self.pending += tar_header(entry, size)
        if entry.kind is not Kind.FILE:
            if len(self.pending) > _PENDING_BYTES:
                self.flush_pending()
        elif isinstance(content, Deflated):
            # the stream goes into the layer as it is; of an empty file there is none, only checked
            before = self._open_member() if size else (0, 0)
            offset = self.blob.size_bytes if size else 0
            packed = self._read(content, content.packed_bytes, is_copied=size > 0)
            for chunk in deflate.inflate(packed, size, entry.path):
                self.tar.write(chunk)
                sha.update(chunk)
                crc = isal_zlib.crc32(chunk, crc)
            if size:
                # a member's CRC is over header and content; the content is not read twice for it
                whole = isal_zlib.crc32_combine(before[0], crc, size)
                self.blob.write(trailer(whole, before[1] + size))
        else:
            pieces: Iterable[bytes]
            if isinstance(content, Slice):
                pieces = self._read(content, size)
            else:
                pieces = (content[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES))
            # a member a piece: libdeflate compresses only what it has whole in memory
            for piece in pieces:
                head_crc, head_size = self._open_member()
                offset = offset or self.blob.size_bytes
                sha.update(piece)
                crc = isal_zlib.crc32(piece, crc)
                self.tar.write(piece)
                ends = trailer(isal_zlib.crc32(piece, head_crc), head_size + len(piece))
                self.blob.write(deflate.compress(piece) + ends)
        self.pending += padding(size)
        stated = None if isinstance(content, bytes) else content.crc32
        if stated is not None and crc != stated:
            raise CorruptArchive(f"{entry.path}: CRC is {crc:08x}, its archive states {stated:08x}")
        if entry.sha256 and sha.hexdigest() != entry.sha256:
            raise CorruptArchive(f"{entry.path}: its RECORD promises {entry.sha256}", WRONG_RECORD)
        digest = sha.hexdigest() if entry.kind is Kind.FILE else ""
        row = (entry.path, entry.kind, entry.mode, size, digest, offset, entry.target, entry.owner)
        return FileRow(*row)

    def _read(
        self, content: Slice | Deflated, length: int, *, is_copied: bool = False
    ) -> Iterator[bytes]:
        path = content.path
        # thousands of members of one wheel share one open file
        if path not in self._files:
            self._files[path] = self.reading.enter_context(open(path, "rb"))  # noqa: PTH123, SIM115
        self._files[path].seek(content.offset)
        while length:
            chunk = self._files[path].read(min(CHUNK_BYTES, length))
            if not chunk:
                raise CorruptArchive(f"{path}: ends {length} bytes early")
            length -= len(chunk)
            if is_copied:
                self.blob.write(chunk)
            yield chunk

    def _open_member(self) -> tuple[int, int]:
        """Begins a gzip member with the tar bytes that wait; returns their CRC and length."""
        data = bytes(self.pending)
        self.pending.clear()
        self.tar.write(data)
        self.blob.write(deflate.GZIP_HEAD + (deflate.squeeze(data) if data else b""))
        return isal_zlib.crc32(data), len(data)

    def flush_pending(self) -> None:
        crc, size = self._open_member()
        self.blob.write(deflate.FINAL_BLOCK + trailer(crc, size))


def write_layer(entries: Iterable[Entry], out: BinaryIO) -> WrittenLayer:
    """Writes all entries to `out` as one layer."""
    writer = _LayerWriter(out)
    with writer.reading:
        rows = [writer.add(entry) for entry in entries]
        writer.pending += END
        writer.flush_pending()
        record = LayerRecord(
            digest=writer.blob.digest(),
            diff_id=writer.tar.digest(),
            size_bytes=writer.blob.size_bytes,
            unpacked_bytes=writer.tar.size_bytes,
        )
    return WrittenLayer(record, rows)


def read_layer_file(blob: Path, row: FileRow) -> bytes:
    """One file of a finished layer by its row, checked by its hash."""
    return b"".join(read_pieces(blob, row))


def read_pieces(blob: Path, row: FileRow, step_bytes: int = _STEP_BYTES) -> Iterator[bytes]:
    """The same in pieces of bounded size, checked at the end; a reader may stop early."""
    sha, remaining, at = hashlib.sha256(), row.size_bytes, row.offset
    try:
        with blob.open("rb") as handle:
            # a file's members one after the other; those after the first have a gzip header each
            while remaining:
                handle.seek(at)
                # not ISA-L, which miscounts the bytes that follow a stream
                engine, chunk = zlib.decompressobj(-15), b""
                while not engine.eof:
                    if not chunk:
                        # most files are small: whole chunks would be a hundred times as much
                        chunk = handle.read(min(CHUNK_BYTES, step_bytes, remaining + _SLACK_BYTES))
                        at += len(chunk)
                        if not chunk:
                            raise StoreDamaged(f"{blob.name}: ends inside {row.path}")
                    piece = engine.decompress(chunk, step_bytes)
                    chunk = engine.unconsumed_tail
                    remaining -= len(piece)
                    if remaining < 0:
                        raise StoreDamaged(f"{blob.name}: {row.path} is longer than it should be")
                    sha.update(piece)
                    yield piece
                at += len(deflate.GZIP_HEAD) + _TRAILER_BYTES - len(engine.unused_data)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{blob.name}: not in the store") from error
    except zlib.error as error:
        raise StoreDamaged(f"{blob.name}: {row.path} is damaged ({error})") from error
    if sha.hexdigest() != row.sha256:
        raise StoreDamaged(f"{blob.name}: {row.path} does not match the table of contents")
