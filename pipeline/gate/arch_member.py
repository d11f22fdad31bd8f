"""A file of a layer, piece by piece, checked by its hash at the end."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path

from pipeline.build.deflate import CHUNK_BYTES, GZIP_HEAD
from pipeline.errors import StoreDamaged
from pipeline.store.record import FileRow

_TRAILER_BYTES = 8
_STEP_BYTES = 4 << 20


def read_pieces(blob: Path, row: FileRow, step_bytes: int = _STEP_BYTES) -> Iterator[bytes]:
    """The file's bytes in pieces of bounded size; a reader may stop early."""
    sha, left, at = hashlib.sha256(), row.size_bytes, row.offset
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
                piece = _inflated(engine, chunk, step_bytes, blob, row)
                chunk = engine.unconsumed_tail
                sha.update(piece)
                left -= len(piece)
                if left < 0:
                    raise StoreDamaged(f"{blob.name}: {row.path} is longer than it should be")
                yield piece
            at += len(GZIP_HEAD) + _TRAILER_BYTES - len(engine.unused_data)
    if sha.hexdigest() != row.sha256:
        raise StoreDamaged(f"{blob.name}: {row.path} is not what the table of contents says")


def _inflated(
    engine: zlib._Decompress, chunk: bytes, step_bytes: int, blob: Path, row: FileRow
) -> bytes:
    try:
        return engine.decompress(chunk, step_bytes)
    except zlib.error as error:
        raise StoreDamaged(f"{blob.name}: {row.path} is damaged ({error})") from error
