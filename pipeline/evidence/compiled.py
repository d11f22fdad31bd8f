"""The compiled trees of an image: how each was made, what it was made from and in what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.assemble.plan import ImagePlan, TreePlan
from pipeline.attest.names import archive_purl, build_time_urn, image_purl, tree_purl
from pipeline.attest.strict import plain
from pipeline.evidence.inventory import package_purl, placed_layers, suite_of, tree_record
from pipeline.lock.model import Pin
from pipeline.oci.record import TitledLayer
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.source.compiled import CompiledTree


@dataclass(frozen=True)
class ImageTree:
    """A compiled tree in an image: its plan, its layer, and what is remembered of its making."""

    image: str
    plan: TreePlan
    layer: TitledLayer
    made: CompiledTree

    @property
    def purl(self) -> str:
        source = self.plan.source
        architecture = self.plan.platform.partition("/")[2]
        return tree_purl(source.name, source.upstream.commit, self.plan.name, architecture)

    @property
    def archive_purl(self) -> str:
        pin = self.plan.lock.archive
        return archive_purl(pin.kind, pin.name, pin.version, pin.file, pin.sha256)

    @property
    def objects_text(self) -> str:
        return objects_text(self.made.model_dump(mode="json", include={"objects", "taken"}))


def objects_text(run: Mapping[str, Any]) -> str:
    """Where the objects of a tree came from, as far as it is known."""
    objects, taken = run["objects"], run.get("taken")
    if taken:
        signed_by = ", ".join(str(x)[:19] + "…" for x in taken["signed_by"])
        there = objects_text({"objects": objects})
        text = f"compiled on another machine, by a statement that {signed_by} signed"
        return plain(f"{text}; there: {there}")
    compiled, kept = int(objects["compiled"]), int(objects["kept"])
    imported = int(objects.get("imported", 0))
    if not compiled and not kept and not imported:
        return "no compiler was called through the object cache"
    parts = [f"{log.count(compiled, 'object')} compiled in this build"]
    if kept:
        # a file that somebody copied into the cache leaves no trace there
        parts.append(f"{kept} taken from the object cache, compiled there before or copied into it")
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
        return image_purl(self.name, self.digest, self.plan.architecture)

    @property
    def parts(self) -> list[ToolchainPart]:
        suite = suite_of(self.plan)
        return [
            self._part(each.spec.name, pin, package_purl(pin, suite))
            for each in self.plan.chain()
            for pin in each.lock.pins
        ]

    def _part(self, image: str, pin: Pin, purl: str) -> ToolchainPart:
        return ToolchainPart(image, pin, purl, build_time_urn(self.name, self.plan.platform, purl))


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
