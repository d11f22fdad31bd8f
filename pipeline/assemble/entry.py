"""What a layer is made of, before it is bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.oci.record import Kind

# What every Linux file system allows; the path less what engines put before it when they unpack.
_LONGEST_NAME_BYTES = 255
_LONGEST_PATH_BYTES = 4096 - 256
# Today's deepest path has some 20 parts; each costs a look at every folder above it.
_MOST_PARTS = 500
# In a layer, a file of such a name deletes another one, or all that a folder held below.
_WHITEOUT = ".wh."


# What helps with a file that is not what its wheel's RECORD says.
WRONG_RECORD = (
    "Nothing was kept. If it was published so, name the wheel under `python: rewrite_record:`, with"
    " the reason; else lock another version."
)


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


def path_fault(path: str) -> str:
    """Why nothing may be written under a path in a layer; empty for a good one."""
    if len(path.encode(errors="replace")) > _LONGEST_PATH_BYTES:
        return "is too long for a path"
    parts = path.split("/")
    if len(parts) > _MOST_PARTS:
        return "has too many folders above it"
    for part in parts:
        if part in ("", ".", ".."):
            return "leaves its folder"
        # https://github.com/opencontainers/image-spec/blob/main/layer.md#whiteouts
        if part.startswith(_WHITEOUT):
            return "would delete other files when it is unpacked"
        if len(part.encode(errors="replace")) > _LONGEST_NAME_BYTES:
            return "has a name that is too long for a file"
    return ""


def parents(path: str) -> Iterator[str]:
    """Every directory above a path, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def with_parents(entries: list[Entry]) -> list[Entry]:
    """Sorted by path, with every missing parent directory added."""
    known = {e.path: e for e in entries}
    for entry in entries:
        for parent in parents(entry.path):
            known.setdefault(parent, Entry(path=parent, kind=Kind.DIR, mode=0o755))
    # a folder sorts before what is in it; the order is part of the digest
    return [known[path] for path in sorted(known)]
