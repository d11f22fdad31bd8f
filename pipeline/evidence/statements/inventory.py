"""What an image is made of, part by part, and which layer holds each; where a file came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pipeline.artifacts.attest import names
from pipeline.artifacts.attest.strict import plain
from pipeline.artifacts.oci.record import TitledLayer
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import StoreDamaged
from pipeline.core.model import sha256_of
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.inside import locate
from pipeline.images.assemble.plan import ImagePlan, LayerPlan, TreePlan, WarmPlan
from pipeline.images.assemble.view import see
from pipeline.images.lock.model import BasePin, DebPin, Pin, WheelPin
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import PatchSpec
from pipeline.images.spec.source import SourcePatch

if TYPE_CHECKING:
    from pipeline.images.source.compiled import CompiledTree


@dataclass(frozen=True)
class PlacedLayer:
    """A layer of a built image, and the image of the chain that it comes from."""

    image: str
    layer: TitledLayer
    plan: LayerPlan | None = None  # none for an image's own files, patches and a foreign base
    base: BasePin | None = None  # the foreign base that it is a layer of
    tree: TreePlan | None = None  # the compiled tree that it holds
    warm: WarmPlan | None = None  # the kernels that it holds


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
        return names.file_urn(self.path)

    @property
    def kind(self) -> str:
        return "patch" if self.patch else "file"


@dataclass(frozen=True)
class BaseImage:
    """A foreign base: known by its digests, not by its contents."""

    image: str  # of ours, that names it
    pin: BasePin
    purl: str


def placed_layers(built: Built) -> list[PlacedLayer]:
    """Every layer with its origin, from the root image's first to the image's patches."""
    # layers are matched in their order: several images of the chain may have the same title
    todo = list(built.layers)
    placed: list[PlacedLayer] = []

    for each in built.plan.chain():
        name, base = each.spec.name, each.lock.base_image
        pins = base.layers if base else []
        wanted: list[tuple[str, str, dict[str, Any]]] = [
            *((x.digest, f"the base's {x.digest}", {"base": base}) for x in pins),
            *((x.title, f"the layer {x.title!r}", {"plan": x}) for x in each.layers),
            *((x.title, f"the layer {x.title!r}", {"tree": x}) for x in each.trees),
            *((x.title, f"the layer {x.title!r}", {"warm": x}) for x in (each.warm,) if x),
        ]
        for key, what, origin in wanted:
            if not todo or key not in (todo[0].title, todo[0].record.digest):
                raise StoreDamaged(f"{built.name}: {what} is not in the image")
            placed.append(PlacedLayer(name, todo.pop(0), **origin))
        # these two have no pins: an image's own files, then its patches, each if there are any;
        # all images call the second one the same, so one without patches must leave it to the next
        for title in [f"{name} files", *(["patches"] if each.inputs.get("patches") else [])]:
            if todo and todo[0].title == title:
                placed.append(PlacedLayer(name, todo.pop(0)))
    if todo:
        raise StoreDamaged(f"{built.name}: nothing accounts for the layer {todo[0].title!r}")
    return placed


def base_image(plan: ImagePlan) -> BaseImage | None:
    """The foreign base of an image, if it has one."""
    root = plan.chain()[0]
    pin = root.lock.base_image
    if pin is None:
        return None
    name, digest = pin.repository.rpartition("/")[2], pin.manifest.digest
    return BaseImage(root.spec.name, pin, names.image_purl(name, digest, plan.architecture))


def package_parts(built: Built) -> list[ImagePart]:
    """Every wheel and .deb, in the order of layers and, within one, of names."""
    return [
        ImagePart(placed.image, pin, _package_purl(pin, built.plan), placed.layer)
        for placed in placed_layers(built)
        if placed.plan is not None
        for pin in placed.plan.pins
    ]


def _package_purl(pin: Pin, plan: ImagePlan) -> str:
    """A wheel or .deb as a package URL."""
    if not isinstance(pin, DebPin):
        return names.wheel_purl(pin.name, pin.version, pin.file)
    # `name_version_arch.deb`; the pin itself has no architecture, and it may be `all`
    architecture = pin.file.removesuffix(".deb").rpartition("_")[2]
    # the suite of the first image of the chain that names one
    suite = next((p.spec.debian.suite for p in plan.chain() if p.spec.debian), "unknown")
    return names.deb_purl(pin.name, pin.version, architecture, distro=suite)


def own_files(checkout: Checkout, plan: ImagePlan) -> list[OwnFile]:
    """Our own files and patches, of the whole chain, as the checkout has them now."""
    files = []
    for each in plan.chain():
        spec = each.spec
        folder = PurePosixPath("images") / checkout.written(spec.name)
        for source in dict.fromkeys(file.source for file in spec.files):
            # one file may be in several places; it is one material all the same
            to = ", ".join(file.to for file in spec.files if file.source == source)
            files.append(OwnFile(spec.name, str(folder / source), "", to=to))
        for patch in checkout.series(spec).patches:
            # a series names its patches relative to itself
            path = (folder / (spec.patches or "")).parent / patch.file
            files.append(OwnFile(spec.name, str(path), "", patch=patch))
    return [replace(x, digest=sha256_of((checkout.root / x.path).read_bytes())) for x in files]


def source_files(tree: TreePlan) -> list[OwnFile]:
    """Our files and patches of a source, in the order that its key lists them."""
    source, folder = tree.source, f"images/sources/{tree.source.name}"
    files = [OwnFile(source.name, f"{folder}/{x.source}", "", to=x.to) for x in source.files]
    files += [OwnFile(source.name, f"{folder}/{x.file}", "", patch=x) for x in source.patches]
    # the digests that the tree was planned with, not those of the checkout by now
    return [replace(file, digest=digest) for file, digest in zip(files, tree.own, strict=True)]


@dataclass(frozen=True)
class ImageTree:
    """A compiled tree in an image: its plan, its layer, and the record of its making."""

    image: str
    plan: TreePlan
    layer: TitledLayer
    made: CompiledTree

    @property
    def purl(self) -> str:
        source, architecture = self.plan.source, self.plan.platform.partition("/")[2]
        commit = quote(source.upstream.commit, safe="")
        return f"pkg:generic/{source.name}@{commit}?arch={architecture}&build={self.plan.name}"

    @property
    def archive_purl(self) -> str:
        pin = self.plan.lock.archive
        return names.archive_purl(pin.kind, pin.name, pin.version, pin.file, pin.sha256)


def objects_origin(run: Mapping[str, Any]) -> str:
    """Where the objects of a tree came from, as far as known."""
    objects, taken = run["objects"], run.get("taken")
    if taken:
        signed_by = ", ".join(str(x)[:19] + "…" for x in taken["signed_by"])
        text = f"compiled on another machine, by a statement that {signed_by} signed"
        return plain(f"{text}; there: {objects_origin({'objects': objects})}")
    compiled, cached = int(objects["compiled"]), int(objects["kept"])
    imported = int(objects.get("imported", 0))
    if not compiled and not cached and not imported:
        return "no compiler was called through the object cache"
    parts = [f"{log.count(compiled, 'object')} compiled in this build"]
    if cached:
        # a file that was copied into the cache leaves no trace there
        parts.append(
            f"{cached} taken from the object cache, compiled there before or copied into it"
        )
    if imported:
        brought_by = ", ".join(str(x)[:19] + "…" for x in objects.get("manifests") or [])
        parts.append(f"{imported} brought from another machine ({brought_by or 'no export named'})")
    return plain("; ".join(parts) if len(parts) > 1 else f"{parts[0]}, none taken from before")


@dataclass(frozen=True)
class ToolchainPart:
    """A wheel or .deb of a toolchain."""

    image: str
    pin: Pin
    purl: str
    urn: str


@dataclass(frozen=True)
class Toolchain:
    """An image that trees were compiled in."""

    plan: ImagePlan
    digest: str

    @property
    def name(self) -> str:
        return self.plan.spec.name

    @property
    def purl(self) -> str:
        return names.image_purl(self.name, self.digest, self.plan.architecture)

    @property
    def parts(self) -> list[ToolchainPart]:
        pins = [(each.spec.name, pin) for each in self.plan.chain() for pin in each.lock.pins]
        named = [(image, pin, _package_purl(pin, self.plan)) for image, pin in pins]
        platform = self.plan.platform
        return [ToolchainPart(*x, names.build_time_urn(self.name, platform, x[2])) for x in named]


def trees_of(store: Store, built: Built) -> list[ImageTree]:
    """The compiled trees of an image, each with the record of its making."""
    return [
        ImageTree(x.image, x.tree, x.layer, tree_record(store, x.tree, x.layer))
        for x in placed_layers(built)
        if x.tree is not None
    ]


def toolchains_of(trees: Sequence[ImageTree]) -> list[Toolchain]:
    """The images that they were compiled in, each once."""
    # by digest: after an upgrade of the builder one plan may have given two images
    known = {tree.made.toolchain: tree.plan.toolchain for tree in trees}
    return [Toolchain(plan, digest) for digest, plan in known.items()]


def tree_record(store: Store, tree: TreePlan, layer: TitledLayer) -> CompiledTree:
    """How a compiled tree of an image was made; the layer must be the one that came out."""
    # loads what compiling needs, and most images hold no tree
    from pipeline.images.source.compiled import read_tree

    made, digest = read_tree(store, tree), layer.record.digest
    if (made.key, made.layer) != (tree.key, digest):
        message = f"the image holds {digest}, but {made.layer} was compiled"
        raise StoreDamaged(f"{tree.title}: {message}")
    return made


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
    toolchain: str | None = None  # the image that it was compiled in


def file_origin(checkout: Checkout, store: Store, built: Built, path: str) -> Origin:
    """Where a file came from; links are followed inside the image."""
    layers = placed_layers(built)
    # the layer that a file is in decides where it came from
    tree = see(((x, store.contents(x.layer.record)) for x in layers), first_folders=True)
    name, links = locate({file: row for file, (_, row) in tree.items()}, built, path)
    placed, row = tree[name]
    found = Origin(
        path=f"/{name}",
        links=tuple(links),
        kind=row.kind,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        layer=placed.layer.title,
        layer_digest=placed.layer.record.digest,
        origin=f"made by the builder for {placed.image}",
    )
    if placed.base:
        # owners of a foreign base's files are not known
        return replace(found, origin=f"the base image {placed.base}")
    if placed.tree and row.owner == placed.tree.source.name:
        plan, ours = placed.tree, source_files(placed.tree)
        made = ImageTree(placed.image, plan, placed.layer, tree_record(store, plan, placed.layer))
        return replace(
            found,
            origin=f"{plan.title}, compiled from {plan.lock.archive.file}",
            package=made.archive_purl,
            package_sha256=plan.lock.archive.sha256,
            patches=tuple(f"{x.path} {x.digest}" for x in ours if x.patch),
            own_files=tuple(f"{x.path} {x.digest}" for x in ours if not x.patch),
            toolchain=f"{plan.toolchain.spec.name} {made.made.toolchain}",
        )
    if placed.warm:
        cases = f"the cases of {placed.warm.base.spec.name}'s gate"
        return replace(found, origin=f"compiled for {placed.warm.card}, for {cases}")
    if row.owner == placed.image:
        found = replace(found, origin=f"a file of images/{placed.image}")
    part = next((p for p in package_parts(built) if p.pin.name == row.owner), None)
    if part:
        found = replace(found, origin=row.owner, package=part.purl, package_sha256=part.pin.sha256)
    if placed.layer.title == "patches":
        patches = tuple(
            f"{f.path} {f.digest}"
            for f in own_files(checkout, built.plan)
            if f.patch and f.image == placed.image
            if any(name.endswith(f"/{p.path}") for p in f.patch.files)
        )
        how = "changed by" if patches else "its RECORD updated after"
        origin = f"{row.owner}, {how} a patch of {placed.image}"
        found = replace(found, origin=origin, patches=patches)
    return found
