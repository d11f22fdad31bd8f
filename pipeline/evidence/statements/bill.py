"""An image's bill of materials as a value, before it is written as CycloneDX or SPDX.

Licences are read from the files that the image itself holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.artifacts.attest.names import image_purl
from pipeline.artifacts.oci.record import Kind
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import UnknownFile
from pipeline.evidence.statements import inventory
from pipeline.evidence.statements.licence import Licence, deb_licence, source_licence, wheel_licence
from pipeline.evidence.statements.vendored import NONE_INSIDE, Vendored, vendored_in
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.layer import read_layer_file
from pipeline.images.assemble.view import follow
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import PatchSpec

# licence files are short texts; a larger file is something else
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class BilledPart:
    """A wheel or .deb with its licence and patches."""

    part: inventory.ImagePart
    licence: Licence
    patches: tuple[inventory.OwnFile, ...]
    vendored: Vendored = NONE_INSIDE  # libraries inside it, by its own bills


@dataclass(frozen=True)
class BilledTree:
    """A compiled tree with its licence and patches; what its source vendors is not listed."""

    tree: inventory.ImageTree
    licence: Licence
    patches: tuple[inventory.OwnFile, ...]


@dataclass(frozen=True)
class Bill:
    """Everything in an image: exact, because the image was assembled from it.

    The contents of a foreign base are not known: it is listed by its digest, and as incomplete.
    """

    image: str
    platform: str
    digest: str
    version: str
    layers: tuple[inventory.PlacedLayer, ...]
    parts: tuple[BilledPart, ...]
    files: tuple[inventory.OwnFile, ...]
    patches: tuple[inventory.OwnFile, ...]
    base: inventory.BaseImage | None  # a foreign one, of which only the digests are known
    root: Path  # of the checkout, for the patches' text
    trees: tuple[BilledTree, ...] = ()
    toolchains: tuple[inventory.Toolchain, ...] = ()
    build_files: tuple[inventory.OwnFile, ...] = ()  # put into sources, or part of a toolchain

    @property
    def purl(self) -> str:
        return image_purl(self.image, self.digest, self.platform.partition("/")[2])


def bill_of(checkout: Checkout, store: Store, built: Built) -> Bill:
    """The bill of a built image."""
    parts, files = inventory.package_parts(built), inventory.own_files(checkout, built.plan)
    licences, vendored = licences_of(store, parts), vendored_in(store, parts)
    patches = tuple(f for f in files if f.patch)
    # a wheel of two images is patched only in the one whose series changes it
    changed: dict[tuple[str, str], list[inventory.OwnFile]] = {}
    for file in patches:
        if isinstance(file.patch, PatchSpec):
            project = canonicalize_name(Requirement(file.patch.applies_to).name)
            changed.setdefault((file.image, project), []).append(file)
    trees = inventory.trees_of(store, built)
    toolchains = inventory.toolchains_of(trees)
    sources = [inventory.source_files(tree.plan) for tree in trees]
    # files of the checkout that went into compiling, beyond those in the image
    compiling = [file for own in sources for file in own]
    compiling += [file for x in toolchains for file in inventory.own_files(checkout, x.plan)]
    known = {file.path for file in files}
    return Bill(
        image=built.name,
        platform=built.platform,
        digest=built.digest,
        # images have no version: the digest is what changes with them
        version=built.digest.removeprefix("sha256:")[:12],
        layers=tuple(inventory.placed_layers(built)),
        parts=tuple(
            BilledPart(
                part,
                licences[part.purl],
                tuple(changed.get((part.image, part.pin.name), ()) if part.is_wheel else ()),
                vendored.get(part.purl, NONE_INSIDE),
            )
            for part in parts
        ),
        files=tuple(f for f in files if not f.patch),
        patches=patches,
        base=inventory.base_image(built.plan),
        root=checkout.root,
        trees=tuple(
            BilledTree(x, source_licence(x.plan.source.licence), tuple(f for f in own if f.patch))
            for x, own in zip(trees, sources, strict=True)
        ),
        toolchains=tuple(toolchains),
        build_files=tuple({f.path: f for f in compiling if f.path not in known}.values()),
    )


def licences_of(store: Store, parts: Sequence[inventory.ImagePart]) -> dict[str, Licence]:
    """Each part's licence, by the part's package URL."""
    licences: dict[str, Licence] = {}
    # a layer's table of contents has 100,000 rows and more: read once for all its packages
    for digest, layer in {x.layer.record.digest: x.layer.record for x in parts}.items():
        inside = [part for part in parts if part.layer.record.digest == digest]
        metadata = {row.owner: row for row in store.find_rows(layer, ".dist-info/METADATA")}
        # as a whole only for .debs, whose copyright files are often links
        is_read = not all(x.is_wheel for x in inside)
        rows = {row.path: row for row in store.contents(layer)} if is_read else {}
        for part in inside:
            what = "METADATA" if part.is_wheel else "copyright file"
            row = metadata.get(part.pin.name)
            if not part.is_wheel:
                path = ""
                # packages of one source often link to one another's; a loop leads to no licence
                with suppress(UnknownFile):
                    path, _ = follow(rows, f"usr/share/doc/{part.pin.name}/copyright")
                row = rows.get(path)
                # in a layer a hard link has no bytes of its own
                row = rows.get(row.target) if row and row.kind == Kind.HARDLINK else row
                row = row if row and row.kind == Kind.FILE else None
            if row is None:
                licence = Licence(reason=f"the image holds no {what} of it")
            elif row.size_bytes > _MOST_BYTES:
                licence = Licence(reason=f"its {what} is larger than {_MOST_BYTES} bytes")
            else:
                data = read_layer_file(store.blob_path(digest), row)
                licence = wheel_licence(data) if part.is_wheel else deb_licence(data)
            licences[part.purl] = licence
    return licences
