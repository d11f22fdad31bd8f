"""What a layer is made of, and its tar headers: written by hand, so no library changes a byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.artifacts.oci.record import Kind
from pipeline.artifacts.oci.tar_reader import MTIME, padding

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
