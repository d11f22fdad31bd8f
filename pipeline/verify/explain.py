"""Which wheel, .deb or patch a file of an image came from."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from pipeline.build.entry import Kind
from pipeline.build.image import Built
from pipeline.build.plan import ImagePlan
from pipeline.errors import UnknownImage
from pipeline.record.inventory import PlacedLayer, own_files, parts_of, placed_layers
from pipeline.store.record import FileRow
from pipeline.store.store import Store
from pipeline.wish.load import Checkout

_MOST_LINKS = 40


@dataclass(frozen=True)
class Origin:
    """A file of an image and where it came from."""

    path: str
    links: tuple[str, ...]  # the links that led to it, as `path → target`
    kind: str
    size_bytes: int
    sha256: str
    layer: str
    layer_digest: str
    origin: str
    package: str | None = None
    package_sha256: str | None = None
    patches: tuple[str, ...] = ()


def explain(checkout: Checkout, store: Store, plan: ImagePlan, built: Built, path: str) -> Origin:
    """Where a file came from; links are followed inside the image."""
    tree = _Tree(store, placed_layers(plan, built))
    found, links = tree.resolve(path)
    placed, row = tree.rows[found]
    part = next((p for p in parts_of(plan, built) if p.pin.name == row.owner), None)
    patches: tuple[str, ...] = ()
    if placed.layer.title == "patches":
        ours = [f for f in own_files(checkout, plan) if f.patch and f.image == placed.image]
        patches = tuple(
            f"{f.path} {f.digest}"
            for f in ours
            if f.patch and any(found.endswith(f"/{p.path}") for p in f.patch.files)
        )
    return Origin(
        path=f"/{found}",
        links=tuple(links),
        kind=row.kind,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        layer=placed.layer.title,
        layer_digest=placed.layer.record.digest,
        origin=_origin(placed, row, part is not None, bool(patches)),
        package=part.purl if part else None,
        package_sha256=part.pin.sha256 if part else None,
        patches=patches,
    )


def _origin(placed: PlacedLayer, row: FileRow, is_packaged: bool, is_patched: bool) -> str:
    if is_patched:
        return f"{row.owner}, changed by a patch of {placed.image}"
    if placed.layer.title == "patches":
        return f"{row.owner}, its RECORD made true after a patch of {placed.image}"
    if is_packaged:
        return row.owner
    if row.owner == placed.image:
        return f"a file of images/{placed.image}"
    return f"made by the builder for {placed.image}"


class _Tree:
    """An image's files as a container sees them: the last layer that has a path decides."""

    def __init__(self, store: Store, layers: list[PlacedLayer]) -> None:
        self.rows: dict[str, tuple[PlacedLayer, FileRow]] = {}
        for placed in layers:
            for row in store.contents(placed.layer.record.digest):
                before = self.rows.get(row.path)
                # a layer names the folders above its files anew: that does not make them its own
                if before and row.kind == Kind.DIR.value == before[1].kind and not row.owner:
                    continue
                self.rows[row.path] = (placed, row)

    def resolve(self, path: str) -> tuple[str, list[str]]:
        """The path with every link on it followed."""
        links: list[str] = []
        current = posixpath.normpath(f"/{path}").strip("/")
        while (link := self._first_link(current)) is not None:
            row = self.rows[link][1]
            links.append(f"/{link} → {row.target}")
            if len(links) > _MOST_LINKS:
                raise UnknownImage(f"/{path}: its links lead in a circle", "")
            target = posixpath.join("/", posixpath.dirname(link), row.target)
            rest = current[len(link) :]
            current = posixpath.normpath(target + rest).strip("/")
        if current not in self.rows:
            raise UnknownImage(f"/{current}: the image holds no such file", "Give its whole path.")
        return current, links

    def _first_link(self, path: str) -> str | None:
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            name = "/".join(parts[:count])
            found = self.rows.get(name)
            if found and found[1].kind == Kind.SYMLINK.value:
                return name
        return None
