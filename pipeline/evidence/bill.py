"""An image's bill of materials as a value, before it is CycloneDX or SPDX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.assemble.image import Built
from pipeline.assemble.plan import ImagePlan
from pipeline.attest.names import image_purl
from pipeline.evidence.declared import licences_of
from pipeline.evidence.inventory import (
    BaseImage,
    OwnFile,
    Part,
    PlacedLayer,
    base_image,
    own_files,
    parts_of,
    placed_layers,
)
from pipeline.evidence.licence import Licence
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store


@dataclass(frozen=True)
class BilledPart:
    """A wheel or .deb with all that a bill says of it."""

    part: Part
    licence: Licence
    patches: tuple[OwnFile, ...]


@dataclass(frozen=True)
class Bill:
    """Everything in an image: exact, because the image was assembled from it.

    What a foreign base holds is not part of that: it is named, and said to be unknown.
    """

    image: str
    platform: str
    digest: str
    version: str
    layers: tuple[PlacedLayer, ...]
    parts: tuple[BilledPart, ...]
    files: tuple[OwnFile, ...]
    patches: tuple[OwnFile, ...]
    base: BaseImage | None  # a foreign one, of which only the digests are known
    root: Path  # of the checkout, for the patches' text

    @property
    def purl(self) -> str:
        return image_purl(self.image, self.digest, self.platform.partition("/")[2])


def bill_of(checkout: Checkout, store: Store, plan: ImagePlan, built: Built) -> Bill:
    """What is in a built image."""
    parts, files = parts_of(plan, built), own_files(checkout, plan)
    licences = licences_of(store, parts)
    patches = tuple(f for f in files if f.patch)
    return Bill(
        image=built.name,
        platform=built.platform,
        digest=built.digest,
        version=built.digest.removeprefix("sha256:")[:12],
        layers=tuple(placed_layers(plan, built)),
        parts=tuple(
            BilledPart(part, licences[part.purl], tuple(p for p in patches if _changes(p, part)))
            for part in parts
        ),
        files=tuple(f for f in files if not f.patch),
        patches=patches,
        base=base_image(plan),
        root=checkout.root,
    )


def _changes(patch: OwnFile, part: Part) -> bool:
    if patch.patch is None or not part.is_wheel or patch.image != part.image:
        return False
    return canonicalize_name(Requirement(patch.patch.applies_to).name) == part.pin.name
