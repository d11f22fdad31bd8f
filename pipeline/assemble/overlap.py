"""Paths that several wheels write: harmless when equal, else the spec must name the winner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.assemble.entry import Deflated, Entry, Slice, parents
from pipeline.errors import PathConflict
from pipeline.oci.record import FileRow, Kind


@dataclass(frozen=True, slots=True)
class Claim:
    """One wheel's claim to a path, in one layer."""

    layer: int
    row: FileRow


def winner(path: str, owners: Sequence[str], prefer: Sequence[str]) -> str:
    """Whose bytes are used for a contested path."""
    for name in prefer:
        # a wheel that contradicts itself has no winner
        if name in owners and len(set(owners)) > 1:
            return name
    if len(set(owners)) == 1:
        raise PathConflict(
            f"/{path}: {owners[0]} is there twice, with different bytes",
            "An image cannot replace a wheel of its base: name the base's own base under `base`,"
            " and all requirements here.",
        )
    listed = " and ".join(sorted(set(owners)))
    raise PathConflict(f"/{path}: {listed} write it with different bytes")


def merge_wheels(groups: Iterable[list[Entry]], prefer: Sequence[str]) -> list[Entry]:
    """The entries of several wheels as one list, each path once."""
    claims: dict[str, list[Entry]] = {}
    for entry in (e for group in groups for e in group):
        claims.setdefault(entry.path, []).append(entry)
    folders = {parent for path in claims for parent in parents(path)}
    _require_files(folders & claims.keys())
    return [_chosen(rivals, prefer) for rivals in claims.values()]


def _chosen(rivals: list[Entry], prefer: Sequence[str]) -> Entry:
    first = rivals[0]
    if all(same_bytes(first, other) for other in rivals[1:]):
        return first
    name = winner(first.path, [entry.owner for entry in rivals], prefer)
    return next(entry for entry in rivals if entry.owner == name)


def _require_files(contested: Iterable[str]) -> None:
    for path in sorted(contested):
        raise PathConflict(
            f"/{path}: is a file in one wheel and a folder in another",
            "Lock another version of one of them, or leave one out under `python: omit:`.",
        )


def same_bytes(one: Entry, other: Entry) -> bool:
    """Whether two files are equal, without reading them."""
    if one.kind is not Kind.FILE or other.kind is not Kind.FILE:
        return one.kind is other.kind and one.target == other.target
    return _identity(one) == _identity(other)


def _identity(entry: Entry) -> object:
    content = entry.content
    if entry.sha256:
        return entry.sha256
    if isinstance(content, Deflated):
        # what no RECORD hashes is compared by what the zip states
        return content.crc32, content.size_bytes
    if isinstance(content, Slice):
        return content.path, content.offset
    return content


def misplaced(layers: Sequence[list[FileRow]], prefer: Sequence[str]) -> list[Claim]:
    """The winners of contested paths that a later layer would hide: they go on top."""
    claims: dict[str, list[Claim]] = {}
    folders: set[str] = set()
    for position, rows in enumerate(layers):
        for row in rows:
            if row.kind == Kind.DIR:
                folders.add(row.path)
            else:
                claims.setdefault(row.path, []).append(Claim(position, row))
    _require_files(folders & claims.keys())
    lost = []
    # in a container the last layer wins, whatever `prefer` names
    for path, rivals in sorted(claims.items()):
        if len({(c.row.kind, c.row.sha256, c.row.target) for c in rivals}) == 1:
            continue
        name = winner(path, [c.row.owner for c in rivals], prefer)
        best = next(c for c in rivals if c.row.owner == name)
        # the winner is on top already
        if best.layer != max(c.layer for c in rivals):
            lost.append(best)
    return lost
