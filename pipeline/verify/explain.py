"""Which wheel, .deb or patch a file of an image came from."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.assemble.image import Built
from pipeline.assemble.plan import ImagePlan
from pipeline.assemble.view import follow, see
from pipeline.errors import UnknownImage
from pipeline.evidence.inventory import PlacedLayer, own_files, parts_of, placed_layers
from pipeline.oci.record import FileRow
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store


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
    layers = placed_layers(plan, built)
    tree = see(((x, store.table(x.layer.record)) for x in layers), first_folders=True)
    found, links = follow({name: row for name, (_, row) in tree.items()}, path)
    if found not in tree:
        raise UnknownImage(f"/{found}: the image holds no such file", "Give its whole path.")
    placed, row = tree[found]
    owned = [p for p in parts_of(plan, built) if p.pin.name == row.owner]
    part = owned[0] if owned and not placed.base else None
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
    if placed.base:
        return f"the base image {placed.base}"
    if is_patched:
        return f"{row.owner}, changed by a patch of {placed.image}"
    if placed.layer.title == "patches":
        return f"{row.owner}, its RECORD made true after a patch of {placed.image}"
    if is_packaged:
        return row.owner
    if row.owner == placed.image:
        return f"a file of images/{placed.image}"
    return f"made by the builder for {placed.image}"
