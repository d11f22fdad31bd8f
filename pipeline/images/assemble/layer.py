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
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord, WrittenLayer
from pipeline.artifacts.oci.tar_reader import END, padding
from pipeline.core.errors import CorruptArchive, HostileArchive, StoreDamaged
from pipeline.images.assemble import deflate
from pipeline.images.assemble.deflate import CHUNK_BYTES, trailer
from pipeline.images.assemble.entry import (
    WRONG_RECORD,
    Deflated,
    Entry,
    Slice,
    path_fault,
    tar_header,
)

# A wheel has thousands of small files: hashed and written one by one, the calls are the work.
_FLUSH_BYTES = 1 << 20
# Folders and links have no content; so many bytes of headers wait for the next file's member.
_PENDING_BYTES = 1 << 15
_LONGEST_TARGET_BYTES = 4095  # PATH_MAX without the closing NUL
_TRAILER_BYTES = 8  # CRC-32 and size, RFC 1952
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
        size, kind, digest, offset = entry.size_bytes, entry.kind, "", 0
        self.pending += tar_header(entry, size)
        if kind is Kind.FILE:
            digest, offset = self._add_content(entry, size)
        elif len(self.pending) > _PENDING_BYTES:
            self.flush_pending()
        row = (entry.path, kind, entry.mode, size, digest, offset, entry.target, entry.owner)
        return FileRow(*row)

    def _add_content(self, entry: Entry, size: int) -> tuple[str, int]:
        """Writes and checks a file's bytes; returns their hash and where in the blob they begin."""
        content, sha, crc, offset = entry.content or b"", hashlib.sha256(), 0, 0
        if isinstance(content, Deflated):
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
        return sha.hexdigest(), offset

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


def read_file(blob: Path, row: FileRow) -> bytes:
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
                        chunk = handle.read(min(CHUNK_BYTES, step_bytes))
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
