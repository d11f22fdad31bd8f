"""An image's files as a container sees them: layer over layer, with what layers take away."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pipeline.assemble.entry import parents
from pipeline.errors import UnknownFile
from pipeline.oci.record import FileRow, Kind

# Rows of foreign layers that are no files: a path that is gone, a folder whose contents are.
WHITEOUT, OPAQUE = "whiteout", "opaque"
# Linux, too, gives up after 40 links on one path.
_MOST_LINKS = 40

Layer = TypeVar("Layer")
View = dict[str, tuple[Layer, FileRow]]


def see(
    layers: Iterable[tuple[Layer, Sequence[FileRow]]], *, first_folders: bool = False
) -> View[Layer]:
    """Every visible path with the layer that decides what it is.

    With `first_folders`, a folder belongs to the layer that first had it: layers name the folders
    above their files anew, which does not make them their own.
    """
    seen: View[Layer] = {}
    for layer, rows in layers:
        _take_away(seen, rows)
        for row in rows:
            if row.kind in (WHITEOUT, OPAQUE):
                continue
            before = seen.get(row.path)
            if first_folders and before and _is_renamed(before[1], row):
                continue
            seen[row.path] = (layer, row)
    return seen


def _is_renamed(before: FileRow, row: FileRow) -> bool:
    return row.kind == Kind.DIR == before.kind and not row.owner


def _take_away(seen: View[Layer], rows: Sequence[FileRow]) -> None:
    """Remove what a layer deletes, empties, or replaces by something that is no folder."""
    gone = {row.path for row in rows if row.kind == WHITEOUT}
    emptied = {row.path for row in rows if row.kind == OPAQUE}
    for row in rows:
        if row.kind not in (Kind.DIR, WHITEOUT, OPAQUE):
            before = seen.get(row.path)
            if before is not None and before[1].kind == Kind.DIR:
                emptied.add(row.path)
    if not gone and not emptied:
        return
    hidden = gone | emptied
    # OCI applies a layer's whiteouts to what is below it, never to its own files
    for path in [p for p in seen if p in gone or any(x in hidden for x in parents(p))]:
        del seen[path]


def follow(rows: Mapping[str, FileRow], path: str) -> tuple[str, list[str]]:
    """A path with every link on it followed inside the image, and the links that were met."""
    links: list[str] = []
    current = posixpath.normpath(f"/{path}").strip("/")
    while (link := _first_link(rows, current)) is not None:
        target = rows[link].target
        links.append(f"/{link} → {target}")
        if len(links) > _MOST_LINKS:
            raise UnknownFile(f"/{path.lstrip('/')}: its links lead in a circle")
        # an absolute target starts at the image's root, not at the machine's
        beyond = posixpath.join("/", posixpath.dirname(link), target)
        current = posixpath.normpath(beyond + current[len(link) :]).strip("/")
    return current, links


def _first_link(rows: Mapping[str, FileRow], path: str) -> str | None:
    parts = path.split("/")
    for count in range(1, len(parts) + 1):
        name = "/".join(parts[:count])
        row = rows.get(name)
        if row is not None and row.kind == Kind.SYMLINK:
            return name
    return None
