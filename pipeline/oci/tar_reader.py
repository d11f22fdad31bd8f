"""Reading somebody else's layer without trusting it: a stream of tar, plain or in gzip.

Every byte is hashed on the way, which yields the diffID; nothing is written anywhere. Names that
lead out of the image are refused, and so is what would need more memory than a name can.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import CorruptArchive, HostileArchive, StoreDamaged
from pipeline.oci.document import GZIP_LAYER
from pipeline.oci.record import FileRow
from pipeline.oci.tar_header import (
    BLOCK,
    LONGEST_NAME,
    decoded,
    header_size,
    pax_records,
    read_header,
)

_CHUNK_BYTES = 1 << 20
# Far above any image, and still an end: a gzip bomb of a few megabytes unpacks to terabytes.
_MOST_BYTES = 512 << 30
_MOST_ENTRIES = 5_000_000
_MOST_PAX_BYTES = 4 << 20  # file capabilities and other attributes come this way
_LONG = {b"L": "path", b"K": "linkpath"}


class TarStream:
    """The entries of a layer one by one; `content` gives the bytes of the one just met."""

    def __init__(self, source: Iterator[bytes], name: str) -> None:
        self._source, self._name = source, name
        self._buffer, self._at = b"", 0
        self._sha = hashlib.sha256()
        self._left = 0  # of the entry just met, padding included
        self.unpacked_bytes = 0

    def entries(self) -> Iterator[FileRow]:
        """Every entry up to the end of the archive, whose rest is read as well."""
        records: dict[str, str] = {}
        for _ in range(_MOST_ENTRIES):
            block = self._exactly(BLOCK)
            if block == b"\0" * BLOCK:
                return self._drain()
            size, flag = header_size(block), block[156:157]
            if flag in _LONG:
                records[_LONG[flag]] = self._long_name(size)
            elif flag in (b"x", b"g"):
                # read in any case, for its bounds; a global header holds times and comments
                pax = self._pax(size)
                records |= pax if flag == b"x" else {}
            else:
                yield from self._one(block, size, records)
                records = {}
        raise HostileArchive(f"{self._name}: holds more than {_MOST_ENTRIES} entries")

    def content(self, row: FileRow) -> Iterator[bytes]:
        """The bytes of the entry just met."""
        left = row.size_bytes
        while left:
            piece = self._some(left)
            left -= len(piece)
            self._left -= len(piece)
            yield piece

    @property
    def diff_id(self) -> str:
        """The digest of all that was read; of a layer, once its entries are at their end."""
        return f"sha256:{self._sha.hexdigest()}"

    def _one(self, block: bytes, size: int, records: dict[str, str]) -> Iterator[FileRow]:
        row = read_header(block, size, records)
        self._left = row.size_bytes + -row.size_bytes % BLOCK
        yield row
        while self._left:
            self._left -= len(self._some(self._left))

    def _long_name(self, size: int) -> str:
        if size > LONGEST_NAME:
            raise HostileArchive(f"{self._name}: a name of {size} bytes")
        return decoded(self._padded(size))

    def _pax(self, size: int) -> dict[str, str]:
        if size > _MOST_PAX_BYTES:
            raise HostileArchive(f"{self._name}: a pax header of {size} bytes")
        return pax_records(self._padded(size), self._name)

    def _padded(self, size: int) -> bytes:
        return self._exactly(size + -size % BLOCK)[:size]

    def _exactly(self, size: int) -> bytes:
        pieces = []
        while size:
            piece = self._some(size)
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _some(self, most: int) -> bytes:
        """Up to so many bytes, at least one."""
        if self._at == len(self._buffer) and not self._fill():
            raise CorruptArchive(f"{self._name}: the tar archive ends too early")
        piece = self._buffer[self._at : self._at + most]
        self._at += len(piece)
        return piece

    def _fill(self) -> bool:
        self._buffer, self._at = next((piece for piece in self._source if piece), b""), 0
        # of the tar as it is, not of what we understand: that is how diffIDs are defined
        self._sha.update(self._buffer)
        self.unpacked_bytes += len(self._buffer)
        if self.unpacked_bytes > _MOST_BYTES:
            raise HostileArchive(f"{self._name}: unpacks to more than {_MOST_BYTES} bytes")
        return bool(self._buffer)

    def _drain(self) -> None:
        """What follows the end belongs to the diffID; only zeros may follow."""
        rest = self._buffer[self._at :]
        while rest or self._fill():
            rest = rest or self._buffer
            if rest.count(0) != len(rest):
                raise CorruptArchive(f"{self._name}: bytes follow the end of the tar archive")
            rest = b""


@contextmanager
def open_layer(
    blob: Path, media_type: str, watch: Callable[[int], None] = lambda n_bytes: None
) -> Iterator[TarStream]:
    """A layer's blob as a stream of entries; `watch` hears of every piece, and may end it."""
    name = f"the layer sha256:{blob.name}"
    try:
        with blob.open("rb") as handle:
            packed = _watched(handle, watch)
            source = _gunzipped(packed, name) if media_type == GZIP_LAYER else packed
            yield TarStream(source, name)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{name}: not in the store") from error


def _watched(handle: BinaryIO, watch: Callable[[int], None]) -> Iterator[bytes]:
    while piece := handle.read(_CHUNK_BYTES):
        watch(len(piece))
        yield piece


def _gunzipped(packed: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Inflate gzip members in a row, a bounded piece at a time."""
    engine, is_fresh = zlib.decompressobj(31), True
    for piece in packed:
        while piece:
            # a gzip file is one or more members in a row (RFC 1952, 2.2)
            if engine.eof:
                engine, is_fresh = zlib.decompressobj(31), True
            try:
                out = engine.decompress(piece, _CHUNK_BYTES)
            except zlib.error as error:
                raise CorruptArchive(f"{name}: cannot be inflated ({error})") from error
            is_fresh = False
            yield out
            piece = engine.unused_data if engine.eof else engine.unconsumed_tail
    while not engine.eof and not is_fresh and (out := engine.decompress(b"", _CHUNK_BYTES)):
        yield out
    if not engine.eof:
        raise CorruptArchive(f"{name}: its gzip stream ends too early")
