"""Reading somebody else's layer without trusting it: a stream of tar, plain or in gzip.

Every byte is hashed on the way, which yields the diffID; nothing is written anywhere. Names that
lead out of the image are refused, and so is what would need more memory than a name can.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.build.tar import BLOCK
from pipeline.errors import CorruptArchive, HostileArchive, StoreDamaged
from pipeline.store.record import GZIP_LAYER

_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 512 << 30
_MOST_ENTRIES = 5_000_000
_LONGEST_NAME = 1 << 16
_MOST_PAX_BYTES = 4 << 20  # file capabilities and other attributes come this way
_KINDS = {
    **dict.fromkeys((b"0", b"\0", b"7"), "file"),
    **{b"1": "hardlink", b"2": "symlink", b"3": "device", b"4": "device"},
    **{b"5": "dir", b"6": "fifo"},
}
_LONG = {b"L": "path", b"K": "linkpath"}


@dataclass(frozen=True, slots=True)
class Header:
    """One entry of a layer."""

    path: str  # relative and clean; empty for the image's root
    kind: str
    mode: int
    uid: int
    gid: int
    size_bytes: int
    target: str


class TarStream:
    """The entries of a layer one by one; `content` gives the bytes of the one just met."""

    def __init__(self, source: Iterator[bytes], name: str) -> None:
        self._source, self._name = source, name
        self._buffer, self._at = b"", 0
        self._sha = hashlib.sha256()
        self._left = 0  # of the entry just met, padding included
        self.unpacked_bytes = 0

    def entries(self) -> Iterator[Header]:
        """Every entry up to the end of the archive, whose rest is read as well."""
        records: dict[str, str] = {}
        for _ in range(_MOST_ENTRIES):
            block = self._exactly(BLOCK)
            if block == b"\0" * BLOCK:
                return self._drain()
            size, flag = _header_size(block), block[156:157]
            if flag in _LONG:
                records[_LONG[flag]] = self._long_name(size)
            elif flag in (b"x", b"g"):
                found = self._pax(size)
                records |= found if flag == b"x" else {}
            else:
                yield from self._one(block, size, records)
                records = {}
        raise HostileArchive(f"{self._name}: holds more than {_MOST_ENTRIES} entries")

    def content(self, header: Header) -> Iterator[bytes]:
        """The bytes of the entry just met."""
        left = header.size_bytes
        while left:
            piece = self._some(left)
            left -= len(piece)
            self._left -= len(piece)
            yield piece

    @property
    def diff_id(self) -> str:
        """The digest of all that was read; of a layer, once its entries are at their end."""
        return f"sha256:{self._sha.hexdigest()}"

    def _one(self, block: bytes, size: int, records: dict[str, str]) -> Iterator[Header]:
        header = _header(block, size, records)
        self._left = header.size_bytes + -header.size_bytes % BLOCK
        yield header
        while self._left:
            self._left -= len(self._some(self._left))

    def _long_name(self, size: int) -> str:
        if size > _LONGEST_NAME:
            raise HostileArchive(f"{self._name}: a name of {size} bytes")
        return _decoded(self._padded(size))

    def _pax(self, size: int) -> dict[str, str]:
        if size > _MOST_PAX_BYTES:
            raise HostileArchive(f"{self._name}: a pax header of {size} bytes")
        return _pax_records(self._padded(size), self._name)

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
def open_layer(blob: Path, media_type: str) -> Iterator[TarStream]:
    """A layer's blob as a stream of entries."""
    name = f"the layer sha256:{blob.name}"
    try:
        with blob.open("rb") as handle:
            packed = iter(lambda: handle.read(_CHUNK_BYTES), b"")
            source = _gunzipped(packed, name) if media_type == GZIP_LAYER else packed
            yield TarStream(source, name)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{name}: not in the store") from error


def _gunzipped(packed: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Inflate gzip members in a row, a bounded piece at a time."""
    engine, is_fresh = zlib.decompressobj(31), True
    for piece in packed:
        while piece:
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


def _header_size(block: bytes) -> int:
    """A header's size field, after its checksum was found true."""
    blanked = block[:148] + b" " * 8 + block[156:]
    if _number(block[148:156]) != sum(blanked):
        raise CorruptArchive("a tar header's checksum is wrong")
    return _number(block[124:136])


def _number(field: bytes) -> int:
    """Octal digits, or GNU's binary for what has too many of them."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise CorruptArchive(f"not a number in a tar header: {field!r}")
    return int(digits or b"0", 8)


def _header(block: bytes, size: int, records: dict[str, str]) -> Header:
    name = records.get("path") or _decoded(_name(block))
    path, flag = _clean_path(name), block[156:157]
    kind = _KINDS.get(flag)
    if kind is None or any(key.startswith("GNU.sparse") for key in records):
        raise CorruptArchive(f"{path}: a tar entry of a kind that layers do not have: {flag!r}")
    target = records.get("linkpath") or _decoded(block[157:257])
    if kind == "hardlink":
        target = _clean_path(target)
    # what is no file has no content, whatever size it states
    size = _decimal(records.get("size"), size) if kind == "file" else 0
    return Header(
        path=path,
        # old archives write folders as files whose names end with a slash
        kind="dir" if kind == "file" and name.endswith("/") else kind,
        mode=_number(block[100:108]) & 0o7777,
        uid=_decimal(records.get("uid"), _number(block[108:116])),
        gid=_decimal(records.get("gid"), _number(block[116:124])),
        size_bytes=size,
        target=target if kind in ("symlink", "hardlink") else "",
    )


def _name(block: bytes) -> bytes:
    """The name; POSIX archives keep the start of a long one in a field that GNU's use otherwise."""
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _decoded(field: bytes) -> str:
    """A name as text: what is no UTF-8, or would steer a terminal, is shown by its number."""
    text = field.partition(b"\0")[0].decode(errors="backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _decimal(text: str | None, otherwise: int) -> int:
    if text is None:
        return otherwise
    if not text.isdecimal() or not text.isascii() or len(text) > 18:
        raise CorruptArchive(f"not a number in a pax header: {text[:40]!r}")
    return int(text)


def _clean_path(name: str) -> str:
    """`./usr/bin/` as `usr/bin`; the root itself as an empty path."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or not name:
        raise HostileArchive(f"the path {name!r} leaves the image")
    return "/".join(parts)


def _pax_records(data: bytes, name: str) -> dict[str, str]:
    """`LENGTH key=value` lines; a value may hold anything, its length counts."""
    found: dict[str, str] = {}
    while data.strip(b"\0"):
        length, space, _ = data.partition(b" ")
        end = int(length) if space and length.isdigit() and len(length) < 10 else 0
        line = data[len(length) + 1 : end]
        key, sign, value = line.partition(b"=")
        if not sign or not line.endswith(b"\n") or end > len(data):
            raise CorruptArchive(f"{name}: a pax header is damaged")
        found[key.decode(errors="backslashreplace")] = _decoded(value[:-1])
        data = data[end:]
    return found
