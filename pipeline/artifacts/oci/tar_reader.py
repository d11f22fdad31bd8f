"""Tar archives of layers: their constants, and reading those of others without trusting them.

Reads ustar, GNU's long names and pax records from a stream, plain or in gzip. Every byte is hashed
as it passes, which yields the diffID; nothing is written anywhere. Names that lead out of the image
are refused, and so is what would need more memory than a name can.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.artifacts.oci.document import GZIP_LAYER, ZSTD_LAYER
from pipeline.artifacts.oci.record import FileRow
from pipeline.core.errors import CorruptArchive, HostileArchive, StoreDamaged
from pipeline.core.files import gunzipped, unpacked_zstd

BLOCK = 512
END = b"\0" * (2 * BLOCK)
# 1980-01-01, the first day that zip archives can name: too old to be a build date.
MTIME = 315532800
# NUL is how archives before POSIX mark a file, 7 a contiguous one.
_KINDS = {
    **dict.fromkeys((b"0", b"\0", b"7"), "file"),
    **{b"1": "hardlink", b"2": "symlink", b"3": "device", b"4": "device"},
    **{b"5": "dir", b"6": "fifo"},
}
_LONGEST_NAME = 1 << 16  # Linux takes 4096 bytes of a path
# GNU tar leaves out holes like this: the content would not be the file.
_SPARSE = "GNU.sparse"
_WANTED = (b"path", b"linkpath", b"size", b"uid", b"gid")
_MOST_LENGTH_DIGITS = 9
_NO_OWNER = 2**32 - 1
_CHUNK_BYTES = 1 << 20
# Far above any image, and still an end: a gzip bomb of a few megabytes unpacks to terabytes.
_MOST_BYTES = 512 << 30
_MOST_ENTRIES = 5_000_000
_MOST_PAX_BYTES = 4 << 20  # pax headers carry file capabilities and other attributes
_LONG = {b"L": "path", b"K": "linkpath"}


def padding(size_bytes: int) -> bytes:
    """What follows a file's bytes up to the next block."""
    return b"\0" * (-size_bytes % BLOCK)


def header_size(block: bytes) -> int:
    """A header's size field, after its checksum was checked."""
    blanked = block[:148] + b" " * 8 + block[156:]
    if read_number(block[148:156]) != sum(blanked):
        raise CorruptArchive("a tar header's checksum is wrong")
    return read_number(block[124:136])


def read_number(field: bytes) -> int:
    """Octal digits, or GNU's binary for what has too many of them."""
    # a size of 8 GiB or more, or an owner above 2 million
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise CorruptArchive(f"not a number in a tar header: {field!r}")
    return int(digits or b"0", 8)


def header_name(block: bytes) -> bytes:
    """The name; POSIX archives keep the start of a long one in a field that GNU's use otherwise."""
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _decoded(field: bytes) -> str:
    """A name as text: what is no UTF-8, or would steer a terminal, is shown by its number."""
    text = field.partition(b"\0")[0].decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _clean_path(name: str) -> str:
    """`./usr/bin/` as `usr/bin`; the root itself as an empty path."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or not name:
        raise HostileArchive(f"the path {name!r} leaves the image")
    return "/".join(parts)


def _read_header(block: bytes, size: int, records: dict[str, str]) -> FileRow:
    """An entry by its block and by the long names and pax records before it.

    Its path is relative and clean, and empty for the image's root; its content is not hashed yet.
    """
    name = records.get("path") or _decoded(header_name(block))
    path, flag = _clean_path(name), block[156:157]
    kind = _KINDS.get(flag)
    if kind is None or _SPARSE in records:
        raise CorruptArchive(f"{path}: a tar entry of a kind that layers do not have: {flag!r}")
    target = ""
    if kind in ("symlink", "hardlink"):
        target = records.get("linkpath") or _decoded(block[157:257])
        target = _clean_path(target) if kind == "hardlink" else target
    numbers = {"size": size, "uid": read_number(block[108:116]), "gid": read_number(block[116:124])}
    # a folder or link has no content, whatever size it states
    for field in ("size", "uid", "gid") if kind == "file" else ("uid", "gid"):
        if (text := records.get(field)) is not None:
            if not text.isdecimal() or not text.isascii() or len(text) > 18:
                raise CorruptArchive(f"not a number in a pax header: {text[:40]!r}")
            numbers[field] = int(text)
    # Linux has no user or group beyond 32 bits, and the last number means `none in particular`
    for owner in (numbers["uid"], numbers["gid"]):
        if owner >= _NO_OWNER:
            raise CorruptArchive(f"{path}: belongs to {owner}, which is not a user or group id")
    n_bytes = numbers["size"] if kind == "file" else 0
    # old archives write folders as files whose names end with a slash
    kind = "dir" if kind == "file" and name.endswith("/") else kind
    mode = read_number(block[100:108]) & 0o7777
    return FileRow(path, kind, mode, n_bytes, "", 0, target, "", numbers["uid"], numbers["gid"])


def _pax_records(data: bytes, name: str) -> dict[str, str]:
    """`LENGTH key=value` lines; a value may hold anything, its length counts.

    Keeps only the keys that entries use, so a header of any size costs no memory.
    """
    records: dict[str, str] = {}
    at, end = 0, len(data.rstrip(b"\0"))
    while at < end:
        space = data.find(b" ", at, at + _MOST_LENGTH_DIGITS + 1)
        length = data[at:space] if space > at else b""
        start, at = at, at + (int(length) if length.isdigit() else 0)
        line = data[space + 1 : at]
        key, sign, value = line.partition(b"=")
        if at <= start or at > len(data) or not sign or not line.endswith(b"\n"):
            raise CorruptArchive(f"{name}: a pax header is damaged")
        if key in _WANTED:
            if len(value) > _LONGEST_NAME:
                raise HostileArchive(f"{name}: a {key.decode()} of {len(value)} bytes")
            records[key.decode()] = _decoded(value[:-1])
        elif key.startswith(_SPARSE.encode()):
            records[_SPARSE] = ""
    return records


class TarStream:
    """The entries of a layer one by one; `content` gives the bytes of the one just met."""

    def __init__(self, source: Iterator[bytes], name: str) -> None:
        self._source, self._name = source, name
        self._buffer, self._at = b"", 0
        self._sha = hashlib.sha256()
        self._unread = 0  # of the entry just met, padding included
        self.unpacked_bytes = 0

    def entries(self) -> Iterator[FileRow]:
        """Every entry up to the end of the archive, whose rest is read as well."""
        records: dict[str, str] = {}
        for _ in range(_MOST_ENTRIES):
            block = self._exactly(BLOCK)
            if block == b"\0" * BLOCK:
                break
            size, flag = header_size(block), block[156:157]
            if flag in (*_LONG, b"x", b"g"):
                what, most = ("name", _LONGEST_NAME)
                if flag not in _LONG:
                    what, most = ("pax header", _MOST_PAX_BYTES)
                if size > most:
                    raise HostileArchive(f"{self._name}: a {what} of {size} bytes")
                data = self._exactly(size + -size % BLOCK)[:size]
                if flag in _LONG:
                    records[_LONG[flag]] = _decoded(data)
                else:
                    # read in any case, for its bounds; a global header holds times and comments
                    pax = _pax_records(data, self._name)
                    records |= pax if flag == b"x" else {}
                continue
            row, records = _read_header(block, size, records), {}
            self._unread = row.size_bytes + -row.size_bytes % BLOCK
            yield row
            while self._unread:
                self._unread -= len(self._some(self._unread))
        else:
            raise HostileArchive(f"{self._name}: holds more than {_MOST_ENTRIES} entries")
        # bytes after the end belong to the diffID; only zeros may follow
        is_more = True
        while is_more:
            rest = self._buffer[self._at :]
            if rest.count(0) != len(rest):
                raise CorruptArchive(f"{self._name}: bytes follow the end of the tar archive")
            is_more = self._fill()

    def content(self, row: FileRow) -> Iterator[bytes]:
        """The bytes of the entry just met."""
        remaining = row.size_bytes
        while remaining:
            piece = self._some(remaining)
            remaining -= len(piece)
            self._unread -= len(piece)
            yield piece

    @property
    def diff_id(self) -> str:
        """The digest of all that was read; of a layer, once its entries are at their end."""
        return f"sha256:{self._sha.hexdigest()}"

    def _exactly(self, size: int) -> bytes:
        pieces = []
        while size:
            pieces.append(self._some(size))
            size -= len(pieces[-1])
        return b"".join(pieces)

    def _some(self, most: int) -> bytes:
        """Up to so many bytes, at least one."""
        if self._at == len(self._buffer) and not self._fill():
            raise CorruptArchive(f"{self._name}: the tar archive ends too early")
        piece = self._buffer[self._at : self._at + most]
        self._at += len(piece)
        return piece

    def _fill(self) -> bool:
        try:
            self._buffer, self._at = next((piece for piece in self._source if piece), b""), 0
        except zlib.error as error:
            raise CorruptArchive(f"{self._name}: cannot be inflated ({error})") from error
        except EOFError as error:
            raise CorruptArchive(f"{self._name}: its compressed stream ends too early") from error
        # of the tar as it is, not of what we understand: that is how diffIDs are defined
        self._sha.update(self._buffer)
        self.unpacked_bytes += len(self._buffer)
        if self.unpacked_bytes > _MOST_BYTES:
            raise HostileArchive(f"{self._name}: unpacks to more than {_MOST_BYTES} bytes")
        return bool(self._buffer)


@contextmanager
def open_layer(
    blob: Path, media_type: str, watch: Callable[[int], None] = lambda n_bytes: None
) -> Iterator[TarStream]:
    """A layer's blob as a stream of entries; `watch` hears of every piece, and may end it."""
    name = f"the layer sha256:{blob.name}"

    def packed() -> Iterator[bytes]:
        while piece := handle.read(_CHUNK_BYTES):
            watch(len(piece))
            yield piece

    try:
        with blob.open("rb") as handle:
            unpacked = packed()
            if media_type in (GZIP_LAYER, ZSTD_LAYER):
                unpack = gunzipped if media_type == GZIP_LAYER else unpacked_zstd
                unpacked = unpack(unpacked, _CHUNK_BYTES)
            yield TarStream(unpacked, name)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{name}: not in the store") from error
