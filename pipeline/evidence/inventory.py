"""What an image is made of, part by part, and which layer holds each; where a file came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pipeline.assemble.image import Built
from pipeline.assemble.inside import locate
from pipeline.assemble.plan import ImagePlan, LayerPlan, TreePlan
from pipeline.assemble.view import see
from pipeline.attest.names import archive_purl, deb_purl, file_urn, image_purl, wheel_purl
from pipeline.errors import StoreDamaged
from pipeline.lock.model import BasePin, DebPin, Pin, WheelPin
from pipeline.model import sha256_of
from pipeline.oci.record import FileRow, TitledLayer
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import PatchSpec
from pipeline.spec.source import SourcePatch
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.source.compiled import CompiledTree


@dataclass(frozen=True)
class PlacedLayer:
    """A layer of a built image, and the image of the chain that it comes from."""

    image: str
    layer: TitledLayer
    plan: LayerPlan | None  # none for an image's own files, patches and a foreign base
    base: BasePin | None = None  # the foreign base that it is a layer of
    tree: TreePlan | None = None  # the compiled tree that it holds


@dataclass(frozen=True)
class ImagePart:
    """A wheel or .deb of an image."""

    image: str
    pin: Pin
    purl: str
    layer: TitledLayer

    @property
    def is_wheel(self) -> bool:
        return isinstance(self.pin, WheelPin)


@dataclass(frozen=True)
class OwnFile:
    """A file of the checkout that goes into an image or a source: one of ours, or a patch."""

    image: str
    path: str  # below the checkout
    digest: str
    patch: PatchSpec | SourcePatch | None = None
    to: str = ""

    @property
    def urn(self) -> str:
        return file_urn(self.path)


def placed_layers(built: Built) -> list[PlacedLayer]:
    """Every layer with its origin, from the root image's first to the image's patches."""
    # layers are matched in their order: a title alone may stand in several images of the chain
    left = list(built.layers)
    placed: list[PlacedLayer] = []
    for each in built.plan.chain():
        name, base = each.spec.name, each.lock.base_image
        for pin in base.layers if base else []:
            if not left or left[0].record.digest != pin.digest:
                raise StoreDamaged(f"{built.name}: the base's {pin.digest} is not in the image")
            placed.append(PlacedLayer(name, left.pop(0), None, base))
        for wanted in each.layers:
            if not left or left[0].title != wanted.title:
                raise StoreDamaged(f"{built.name}: the layer {wanted.title!r} is not in the image")
            placed.append(PlacedLayer(name, left.pop(0), wanted))
        for tree in each.trees:
            if not left or left[0].title != tree.title:
                raise StoreDamaged(f"{built.name}: the layer {tree.title!r} is not in the image")
            placed.append(PlacedLayer(name, left.pop(0), None, tree=tree))
        # these two have no pins: an image's own files, then its patches, each if there are any;
        # all images call the second one the same, so one without patches must leave it to the next
        titles = [f"{name} files", *(["patches"] if each.inputs.get("patches") else [])]
        for title in titles:
            if left and left[0].title == title:
                placed.append(PlacedLayer(name, left.pop(0), None))
    if left:
        raise StoreDamaged(f"{built.name}: nothing accounts for the layer {left[0].title!r}")
    return placed


@dataclass(frozen=True)
class BaseImage:
    """A foreign base: known by its digests, not by what is in it."""

    image: str  # of ours, that names it
    pin: BasePin
    purl: str


def base_image(plan: ImagePlan) -> BaseImage | None:
    """The foreign base of an image, if it has one."""
    root = plan.chain()[0]
    pin = root.lock.base_image
    if pin is None:
        return None
    name = pin.repository.rpartition("/")[2]
    purl = image_purl(name, pin.manifest.digest, plan.architecture)
    return BaseImage(root.spec.name, pin, purl)


def parts_of(built: Built) -> list[ImagePart]:
    """Every wheel and .deb, in the order of layers and, within one, of names."""
    suite = suite_of(built.plan)
    return [
        ImagePart(placed.image, pin, package_purl(pin, suite), placed.layer)
        for placed in placed_layers(built)
        if placed.plan is not None
        for pin in placed.plan.pins
    ]


def suite_of(plan: ImagePlan) -> str:
    """Where .debs come from: the suite of the first image of the chain that names one."""
    return next((p.spec.debian.suite for p in plan.chain() if p.spec.debian), "unknown")


def package_purl(pin: Pin, suite: str) -> str:
    """A wheel or .deb as a package URL."""
    if isinstance(pin, DebPin):
        # `name_version_arch.deb`; the pin itself has no architecture, and it may be `all`
        architecture = pin.file.removesuffix(".deb").rpartition("_")[2]
        return deb_purl(pin.name, pin.version, architecture, suite)
    return wheel_purl(pin.name, pin.version, pin.file)


def own_files(checkout: Checkout, plan: ImagePlan) -> list[OwnFile]:
    """Our own files and patches, of the whole chain, as the checkout has them now."""
    files = []
    for each in plan.chain():
        spec, folder = each.spec, PurePosixPath("images") / each.spec.name
        for source in dict.fromkeys(file.source for file in spec.files):
            path = str(folder / source)
            # one file may lie in several places; it is one material all the same
            to = ", ".join(file.to for file in spec.files if file.source == source)
            files.append(OwnFile(spec.name, path, _digest(checkout, path), to=to))
        for patch in checkout.series(spec).patches:
            # a series names its patches relative to itself
            path = str((folder / (spec.patches or "")).parent / patch.file)
            files.append(OwnFile(spec.name, path, _digest(checkout, path), patch=patch))
    return files


def source_files(tree: TreePlan) -> list[OwnFile]:
    """What is put into a source and changed in it, in the order that its key lists them."""
    source, folder = tree.source, f"images/sources/{tree.source.name}"
    files = [OwnFile(source.name, f"{folder}/{x.source}", "", to=x.to) for x in source.files]
    files += [OwnFile(source.name, f"{folder}/{x.file}", "", patch=x) for x in source.patches]
    # the digests that the tree was planned with, not those of the checkout by now
    return [replace(file, digest=digest) for file, digest in zip(files, tree.own, strict=True)]


def _digest(checkout: Checkout, path: str) -> str:
    return sha256_of((checkout.root / path).read_bytes())


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
    own_files: tuple[str, ...] = ()  # that were put into the source it was compiled from
    toolchain: str | None = None  # what it was compiled in


def explain(checkout: Checkout, store: Store, built: Built, path: str) -> Origin:
    """Where a file came from; links are followed inside the image."""
    layers = placed_layers(built)
    # the layer that a file is in decides where it came from
    tree = see(((x, store.contents(x.layer.record)) for x in layers), first_folders=True)
    name, links = locate({file: row for file, (_, row) in tree.items()}, built, path)
    placed, row = tree[name]
    if placed.tree and row.owner == placed.tree.source.name:
        return _compiled_origin(store, placed, placed.tree, row, links)
    owned = [p for p in parts_of(built) if p.pin.name == row.owner]
    # owners of a foreign base's files are not known
    part = owned[0] if owned and not placed.base else None
    patches: tuple[str, ...] = ()
    if placed.layer.title == "patches":
        ours = [f for f in own_files(checkout, built.plan) if f.patch and f.image == placed.image]
        patches = tuple(
            f"{f.path} {f.digest}"
            for f in ours
            if f.patch and any(name.endswith(f"/{p.path}") for p in f.patch.files)
        )
    return Origin(
        path=f"/{name}",
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


def _compiled_origin(
    store: Store, placed: PlacedLayer, tree: TreePlan, row: FileRow, links: Sequence[str]
) -> Origin:
    pin, made = tree.lock.archive, tree_record(store, tree, placed.layer)
    ours = source_files(tree)
    return Origin(
        path=f"/{row.path}",
        links=tuple(links),
        kind=row.kind,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        layer=placed.layer.title,
        layer_digest=placed.layer.record.digest,
        origin=f"{tree.title}, compiled from {pin.file}",
        package=archive_purl(pin.kind, pin.name, pin.version, pin.file, pin.sha256),
        package_sha256=pin.sha256,
        patches=tuple(f"{x.path} {x.digest}" for x in ours if x.patch),
        own_files=tuple(f"{x.path} {x.digest}" for x in ours if not x.patch),
        toolchain=f"{tree.toolchain.spec.name} {made.toolchain}",
    )


def tree_record(store: Store, tree: TreePlan, layer: TitledLayer) -> CompiledTree:
    """How a compiled tree of an image was made; the layer must be the one that came out."""
    # loads what compiling needs, and most images hold no tree
    from pipeline.source.compiled import read_tree

    made = read_tree(store, tree)
    if (made.key, made.layer) != (tree.key, layer.record.digest):
        raise StoreDamaged(
            f"{tree.title}: the image holds {layer.record.digest}, but {made.layer} was compiled"
        )
    return made


def _origin(placed: PlacedLayer, row: FileRow, is_packaged: bool, is_patched: bool) -> str:
    if placed.base:
        return f"the base image {placed.base}"
    if is_patched:
        return f"{row.owner}, changed by a patch of {placed.image}"
    if placed.layer.title == "patches":
        return f"{row.owner}, its RECORD updated after a patch of {placed.image}"
    if is_packaged:
        return row.owner
    if row.owner == placed.image:
        return f"a file of images/{placed.image}"
    return f"made by the builder for {placed.image}"
