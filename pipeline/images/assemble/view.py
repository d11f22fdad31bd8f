"""An image's files as a container sees them: layer over layer, with what layers take away."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pipeline.artifacts.oci.record import FileRow, Kind
from pipeline.core.errors import UnknownFile
from pipeline.images.assemble.layer import parents

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
        removed = {row.path for row in rows if row.kind == WHITEOUT}
        emptied = {row.path for row in rows if row.kind == OPAQUE}
        files = [row for row in rows if row.kind not in (WHITEOUT, OPAQUE)]
        # a folder that a file or link replaces takes all below it away
        replaced = (row.path for row in files if row.kind != Kind.DIR and row.path in seen)
        emptied |= {path for path in replaced if seen[path][1].kind == Kind.DIR}
        if hidden := removed | emptied:
            # OCI applies a layer's whiteouts to the layers below it, never to its own files
            for path in [p for p in seen if p in removed or any(x in hidden for x in parents(p))]:
                del seen[path]
        for row in files:
            before = seen.get(row.path)
            is_folder = before is not None and row.kind == Kind.DIR == before[1].kind
            if not (first_folders and is_folder and not row.owner):
                seen[row.path] = (layer, row)
    return seen


def follow(rows: Mapping[str, FileRow], path: str) -> tuple[str, list[str]]:
    """A path with every link on it followed inside the image, and the links that were met."""
    links: list[str] = []
    current = posixpath.normpath(f"/{path}").strip("/")
    while True:
        parts = current.split("/")
        heads = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
        link = next((x for x in heads if x in rows and rows[x].kind == Kind.SYMLINK), None)
        if link is None:
            return current, links
        target = rows[link].target
        links.append(f"/{link} → {target}")
        if len(links) > _MOST_LINKS:
            raise UnknownFile(f"/{path.lstrip('/')}: its links lead in a circle")
        # an absolute target starts at the image's root, not at the machine's
        beyond = posixpath.join("/", posixpath.dirname(link), target)
        current = posixpath.normpath(beyond + current[len(link) :]).strip("/")
