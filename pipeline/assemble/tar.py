"""Tar headers, written by hand so that no library version can change a byte of them."""

from __future__ import annotations

from pipeline.assemble.entry import Entry
from pipeline.oci.record import Kind
from pipeline.oci.tar_header import MTIME, padding

_FLAGS = {Kind.FILE: b"0", Kind.HARDLINK: b"1", Kind.SYMLINK: b"2", Kind.DIR: b"5"}
# The first numbers that have too many octal digits for their field.
_SIZE_LIMIT, _ID_LIMIT = 8**11, 8**7


def header(entry: Entry, size_bytes: int) -> bytes:
    """The header of one entry, with a pax record only where ustar cannot say it."""
    path = entry.path.encode() + (b"/" if entry.kind is Kind.DIR else b"")
    target = entry.target.encode()
    prefix, name = _split(path)
    records: dict[str, bytes] = {}
    # ustar has no encoding: readers take bytes beyond ASCII for what they like, pax is UTF-8
    if not name or not path.isascii():
        records["path"] = path
        prefix, name = b"", path[:100].decode(errors="ignore").encode()
    if len(target) > 100 or not target.isascii():
        records["linkpath"] = target
        target = target[:100].decode(errors="ignore").encode()
    if size_bytes >= _SIZE_LIMIT:
        records["size"] = str(size_bytes).encode()
        size_bytes = 0
    ids = {"uid": entry.uid, "gid": entry.gid}
    records |= {key: str(number).encode() for key, number in ids.items() if number >= _ID_LIMIT}
    block = _block(prefix, name, _FLAGS[entry.kind], entry, size_bytes, target)
    return _pax(records) + block if records else block


def _split(path: bytes) -> tuple[bytes, bytes]:
    """ustar's (prefix, name), or an empty name where the path does not fit."""
    if len(path) <= 100:
        return b"", path
    # the longest prefix that fits: one rule, as the split is part of the digest
    for at in range(min(155, len(path) - 2), 0, -1):
        if path[at : at + 1] == b"/" and len(path) - at - 1 <= 100:
            return path[:at], path[at + 1 :]
    return b"", b""


def _pax(records: dict[str, bytes]) -> bytes:
    body = b"".join(_record(k, v) for k, v in sorted(records.items()))
    owner = Entry(path="pax", kind=Kind.FILE, mode=0o644)
    head = _block(b"", b"././@PaxHeader", b"x", owner, len(body), b"")
    return head + body + padding(len(body))


def _record(key: str, value: bytes) -> bytes:
    """`LENGTH key=value`, where LENGTH counts itself."""
    rest = b" " + key.encode() + b"=" + value + b"\n"
    length = len(rest) + 1
    # one more digit can make the length one longer
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def _block(
    prefix: bytes, name: bytes, flag: bytes, entry: Entry, size_bytes: int, target: bytes
) -> bytes:
    uid, gid = (number if number < _ID_LIMIT else 0 for number in (entry.uid, entry.gid))
    fields = (
        name.ljust(100, b"\0"),
        b"%07o\0" % entry.mode,
        b"%07o\0" % uid,
        b"%07o\0" % gid,
        b"%011o\0" % size_bytes,
        b"%011o\0" % MTIME,
        # the checksum counts its own field as blanks
        b"        ",
        flag,
        target.ljust(100, b"\0"),
        b"ustar\x0000",
        # no user and group names: numbers decide; no device numbers
        b"\0" * 80,
        prefix.ljust(155, b"\0"),
        b"\0" * 12,
    )
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]
