"""Entries → one layer blob: tar in gzip members, with its digest, diffID and table of contents.

Each file is one gzip member: its tar header squeezed, then the deflate stream the wheel already
holds. Nothing is recompressed; everything is inflated once, which yields the diffID, checks each
CRC and RECORD hash, and records where in the blob each file lies, so that a single file can be
read back later without unpacking the layer.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from pipeline.assemble import tar
from pipeline.assemble.deflate import (
    CHUNK_BYTES,
    FINAL_BLOCK,
    GZIP_HEAD,
    compress,
    inflate,
    squeeze,
    trailer,
)
from pipeline.assemble.entry import WRONG_RECORD, Deflated, Entry, Slice, path_fault
from pipeline.errors import CorruptArchive, HostileArchive, StoreDamaged
from pipeline.oci.record import FileRow, Kind, LayerRecord, WrittenLayer
from pipeline.oci.tar_header import END, padding

# A wheel has thousands of small files: hashed and written one by one, the calls are the work.
_FLUSH_BYTES = 1 << 20
# Folders and links have no content; so many bytes of headers wait for the next file's member.
_PENDING_BYTES = 1 << 15
_LONGEST_TARGET_BYTES = 4095  # PATH_MAX without the closing NUL
_TRAILER_BYTES = 8  # CRC-32 and size, RFC 1952
# bounds what one file costs in memory, however well it was packed
_STEP_BYTES = 4 << 20


class _HashedSink:
    """Collects small writes; hashes, counts and passes them on in large ones."""

    def __init__(self, out: BinaryIO | None) -> None:
        self._out = out
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        self.size_bytes += len(data)
        self._buffer += data
        if len(self._buffer) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        self._hash.update(self._buffer)
        if self._out is not None:
            self._out.write(self._buffer)
        self._buffer.clear()

    def digest(self) -> str:
        self.flush()
        return "sha256:" + self._hash.hexdigest()


class LayerWriter:
    """Writes entries, which must come sorted, to one blob."""

    def __init__(self, out: BinaryIO) -> None:
        self._blob = _HashedSink(out)
        self._tar = _HashedSink(None)
        self._pending = bytearray()  # tar bytes that wait for the next member
        self._rows: list[FileRow] = []
        self._files: dict[str, BinaryIO] = {}
        self.reading = ExitStack()  # the files that entries come from

    def add(self, entry: Entry) -> None:
        """Append one entry."""
        _require_writable(entry)
        size = content_size(entry.content)
        self._pending += tar.header(entry, size)
        digest, offset = "", 0
        if entry.kind is Kind.FILE:
            digest, offset = self._file(entry, size)
        elif len(self._pending) > _PENDING_BYTES:
            self._flush_pending()
        kind = entry.kind
        row = (entry.path, kind, entry.mode, size, digest, offset, entry.target, entry.owner)
        self._rows.append(FileRow(*row))

    def close(self) -> WrittenLayer:
        """End the archive and return what it is."""
        self._pending += END
        self._flush_pending()
        record = LayerRecord(
            digest=self._blob.digest(),
            diff_id=self._tar.digest(),
            size_bytes=self._blob.size_bytes,
            unpacked_bytes=self._tar.size_bytes,
        )
        return WrittenLayer(record, self._rows)

    def _file(self, entry: Entry, size: int) -> tuple[str, int]:
        sha = hashlib.sha256()
        offset = 0
        if size:
            content = entry.content
            if isinstance(content, Deflated):
                offset = self._reused(entry.path, content, sha)
            else:
                offset = self._compressed(entry, sha)
            self._pending += padding(size)
        else:
            self._require_empty(entry.path, entry.content)
        if entry.sha256 and sha.hexdigest() != entry.sha256:
            raise CorruptArchive(f"{entry.path}: its RECORD promises {entry.sha256}", WRONG_RECORD)
        return sha.hexdigest(), offset

    def _reused(self, name: str, content: Deflated, sha: hashlib._Hash) -> int:
        """Pass a deflate stream through as it is, and check what it holds."""
        crc_before, size_before = self._open_member()
        offset = self._blob.size_bytes
        crc = 0
        for chunk in inflate(self._copied(content), content.size_bytes, name):
            self._tar.write(chunk)
            sha.update(chunk)
            crc = isal_zlib.crc32(chunk, crc)
        _require_crc(name, crc, content.crc32)
        # a member's CRC is over header and content; the content is not read twice for it
        whole = isal_zlib.crc32_combine(crc_before, crc, content.size_bytes)
        self._blob.write(trailer(whole, size_before + content.size_bytes))
        return offset

    def _copied(self, content: Deflated) -> Iterator[bytes]:
        for chunk in self._read(content.path, content.offset, content.packed_bytes):
            self._blob.write(chunk)
            yield chunk

    def _compressed(self, entry: Entry, sha: hashlib._Hash) -> int:
        """Compress plain bytes, a gzip member for each piece; the first carries the header."""
        offset, whole_crc = 0, 0
        # a member a piece: libdeflate compresses only what it has whole in memory
        for piece in self._pieces(entry.content):
            crc, size = self._open_member()
            offset = offset or self._blob.size_bytes
            sha.update(piece)
            whole_crc = isal_zlib.crc32(piece, whole_crc)
            self._tar.write(piece)
            self._blob.write(compress(piece))
            self._blob.write(trailer(isal_zlib.crc32(piece, crc), size + len(piece)))
        if isinstance(entry.content, Slice):
            _require_crc(entry.path, whole_crc, entry.content.crc32)
        return offset

    def _require_empty(self, name: str, content: bytes | Slice | Deflated | None) -> None:
        """The bytes of an empty file are left out; there must be none, all the same."""
        if isinstance(content, Deflated):
            packed = self._read(content.path, content.offset, content.packed_bytes)
            for _ in inflate(packed, 0, name):
                pass
        if isinstance(content, Deflated | Slice):
            _require_crc(name, 0, content.crc32)

    def _pieces(self, content: bytes | Slice | Deflated | None) -> Iterator[bytes]:
        if isinstance(content, Slice):
            yield from self._read(content.path, content.offset, content.size_bytes)
        elif isinstance(content, bytes):
            for start in range(0, len(content), CHUNK_BYTES):
                yield content[start : start + CHUNK_BYTES]

    def _read(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        # thousands of members of one wheel share one open file
        if path not in self._files:
            self._files[path] = self.reading.enter_context(open(path, "rb"))  # noqa: PTH123, SIM115
        handle = self._files[path]
        handle.seek(offset)
        while length:
            chunk = handle.read(min(CHUNK_BYTES, length))
            if not chunk:
                raise CorruptArchive(f"{path}: ends {length} bytes early")
            length -= len(chunk)
            yield chunk

    def _open_member(self) -> tuple[int, int]:
        """Begin a gzip member with the tar bytes that wait; return their CRC and length."""
        data = bytes(self._pending)
        self._pending.clear()
        self._tar.write(data)
        self._blob.write(GZIP_HEAD + (squeeze(data) if data else b""))
        return isal_zlib.crc32(data), len(data)

    def _flush_pending(self) -> None:
        crc, size = self._open_member()
        self._blob.write(FINAL_BLOCK + trailer(crc, size))


def _require_writable(entry: Entry) -> None:
    """The last look at a path, wherever it came from, before it is part of a layer."""
    fault = path_fault(entry.path)
    if not fault and len(entry.target.encode(errors="replace")) > _LONGEST_TARGET_BYTES:
        fault = "is a link to a path that is too long"
    if fault:
        raise HostileArchive(f"{entry.owner or 'the image'}: /{entry.path[:200]} {fault}")


def _require_crc(name: str, got: int, stated: int | None) -> None:
    if stated is not None and got != stated:
        raise CorruptArchive(f"{name}: CRC is {got:08x}, its archive states {stated:08x}")


def content_size(content: bytes | Slice | Deflated | None) -> int:
    """How many bytes a file will have when unpacked."""
    if content is None:
        return 0
    return len(content) if isinstance(content, bytes) else content.size_bytes


def write_layer(entries: Iterable[Entry], out: BinaryIO) -> WrittenLayer:
    """Write all entries to `out` as one layer."""
    writer = LayerWriter(out)
    with writer.reading:
        for entry in entries:
            writer.add(entry)
        return writer.close()


def read_file(blob: Path, row: FileRow) -> bytes:
    """One file of a finished layer by its row, checked by its hash."""
    return b"".join(read_pieces(blob, row))


def read_pieces(blob: Path, row: FileRow, step_bytes: int = _STEP_BYTES) -> Iterator[bytes]:
    """The same in pieces of bounded size, checked at the end; a reader may stop early."""
    sha = hashlib.sha256()
    try:
        for piece in _inflated(blob, row, step_bytes):
            sha.update(piece)
            yield piece
    except FileNotFoundError as error:
        raise StoreDamaged(f"{blob.name}: not in the store") from error
    except zlib.error as error:
        raise StoreDamaged(f"{blob.name}: {row.path} is damaged ({error})") from error
    if sha.hexdigest() != row.sha256:
        raise StoreDamaged(f"{blob.name}: {row.path} does not match the table of contents")


def _inflated(blob: Path, row: FileRow, step_bytes: int) -> Iterator[bytes]:
    """A file's members one after the other; those after the first have a gzip header each."""
    left, at = row.size_bytes, row.offset
    with blob.open("rb") as handle:
        while left:
            handle.seek(at)
            # not ISA-L, which miscounts the bytes that follow a stream
            engine = zlib.decompressobj(-15)
            chunk = b""
            while not engine.eof:
                if not chunk:
                    chunk = handle.read(min(CHUNK_BYTES, step_bytes))
                    at += len(chunk)
                    if not chunk:
                        raise StoreDamaged(f"{blob.name}: ends inside {row.path}")
                piece = engine.decompress(chunk, step_bytes)
                chunk = engine.unconsumed_tail
                left -= len(piece)
                if left < 0:
                    raise StoreDamaged(f"{blob.name}: {row.path} is longer than it should be")
                yield piece
            at += len(GZIP_HEAD) + _TRAILER_BYTES - len(engine.unused_data)
