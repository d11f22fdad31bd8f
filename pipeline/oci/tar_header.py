"""Headers of tar archives, whoever wrote them: ustar, GNU's long names, pax records."""

from __future__ import annotations

from pipeline.errors import CorruptArchive, HostileArchive
from pipeline.oci.record import FileRow

BLOCK = 512
END = b"\0" * (2 * BLOCK)
# 1980-01-01, the first day that zip archives can name: old enough to be nobody's build date.
MTIME = 315532800
# NUL is how archives before POSIX mark a file, 7 a contiguous one.
_KINDS = {
    **dict.fromkeys((b"0", b"\0", b"7"), "file"),
    **{b"1": "hardlink", b"2": "symlink", b"3": "device", b"4": "device"},
    **{b"5": "dir", b"6": "fifo"},
}
LONGEST_NAME = 1 << 16  # Linux takes 4096 bytes of a path
# GNU tar's way to leave out holes: the content would not be the file.
SPARSE = "GNU.sparse"
_WANTED = (b"path", b"linkpath", b"size", b"uid", b"gid")
_MOST_LENGTH_DIGITS = 9
_NO_OWNER = 2**32 - 1


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


def read_header(block: bytes, size: int, records: dict[str, str]) -> FileRow:
    """An entry by its block and by the long names and pax records before it.

    Its path is relative and clean, and empty for the image's root; its content is not hashed yet.
    """
    name = records.get("path") or decoded(header_name(block))
    path, flag = _clean_path(name), block[156:157]
    kind = _KINDS.get(flag)
    if kind is None or SPARSE in records:
        raise CorruptArchive(f"{path}: a tar entry of a kind that layers do not have: {flag!r}")
    target = records.get("linkpath") or decoded(block[157:257])
    if kind == "hardlink":
        target = _clean_path(target)
    # what is no file has no content, whatever size it states
    size = _decimal(records.get("size"), size) if kind == "file" else 0
    return FileRow(
        path=path,
        # old archives write folders as files whose names end with a slash
        kind="dir" if kind == "file" and name.endswith("/") else kind,
        mode=read_number(block[100:108]) & 0o7777,
        size_bytes=size,
        sha256="",
        offset=0,
        target=target if kind in ("symlink", "hardlink") else "",
        owner="",
        uid=_owner(_decimal(records.get("uid"), read_number(block[108:116])), path),
        gid=_owner(_decimal(records.get("gid"), read_number(block[116:124])), path),
    )


def header_name(block: bytes) -> bytes:
    """The name; POSIX archives keep the start of a long one in a field that GNU's use otherwise."""
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def decoded(field: bytes) -> str:
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


def _owner(number: int, path: str) -> int:
    """Linux has no user or group beyond 32 bits, and the last one means `nobody in particular`."""
    if number >= _NO_OWNER:
        raise CorruptArchive(f"{path}: belongs to {number}, which is not a user or group id")
    return number


def _clean_path(name: str) -> str:
    """`./usr/bin/` as `usr/bin`; the root itself as an empty path."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or not name:
        raise HostileArchive(f"the path {name!r} leaves the image")
    return "/".join(parts)


def pax_records(data: bytes, name: str) -> dict[str, str]:
    """`LENGTH key=value` lines; a value may hold anything, its length counts.

    Only what is asked of entries is kept, so a header of any size costs no memory.
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
            if len(value) > LONGEST_NAME:
                raise HostileArchive(f"{name}: a {key.decode()} of {len(value)} bytes")
            records[key.decode()] = decoded(value[:-1])
        elif key.startswith(SPARSE.encode()):
            records[SPARSE] = ""
    return records
