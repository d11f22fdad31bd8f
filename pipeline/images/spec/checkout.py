"""The user's checkout: `images/` and `lockfiles/`, and the specs in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline.core.errors import NoCheckout, SpecInvalid, UnknownImage, UnknownSource, there_are
from pipeline.core.yaml_file import read_yaml
from pipeline.images.spec.root import checkout_above

if TYPE_CHECKING:
    from pipeline.images.spec.image import ImageFile, ImageSpec, PatchSeries
    from pipeline.images.spec.source import SourceSpec

Named = TypeVar("Named", "ImageFile", "SourceSpec")


@dataclass(frozen=True)
class Checkout:
    """A folder with `images/` and `lockfiles/`: the user's checkout.

    Specs are slow to load, and verbs about weights and benchmarks read none: they are imported
    where one is read.
    """

    root: Path

    def images(self) -> list[str]:
        """All image names, sorted."""
        # `common` and `sources` are folders of other things
        return sorted(p.parent.name for p in (self.root / "images").glob("*/image.yaml"))

    def written(self, name: str) -> str:
        """The image whose spec and locks an image has: those of IMAGE describe IMAGE-slim."""
        full, images = name.removesuffix("-slim"), self.root / "images"
        if full == name or (images / name).exists() or not (images / full / "image.yaml").is_file():
            return name
        return full if self.spec(full).slim else name

    def folder(self, name: str) -> Path:
        return self.root / "images" / self.written(name)

    def lock_path(self, name: str, platform: str) -> Path:
        # wheels and .debs differ between platforms
        architecture = platform.partition("/")[2]
        file = f"{self.written(name)}.{architecture}.lock.yaml"
        return self.root / "lockfiles" / "images" / file

    def variants(self) -> list[str]:
        """All names that can be built: those of images, and of their slim variants."""
        names = self.images()
        slim = [f"{name}-slim" for name in names if self.spec(name).slim]
        return sorted({*names, *slim})

    def sources(self) -> list[str]:
        """All sources that can be compiled here, sorted."""
        return sorted(p.parent.name for p in (self.root / "images").glob("sources/*/source.yaml"))

    def source_folder(self, name: str) -> Path:
        return self.root / "images" / "sources" / name

    def source_lock_path(self, name: str) -> Path:
        return self.root / "lockfiles" / "sources" / f"{name}.lock.yaml"

    def source(self, name: str) -> SourceSpec:
        """One source's spec."""
        path = self.source_folder(name) / "source.yaml"
        if not path.exists():
            known = there_are(name, self.sources())
            raise UnknownSource(f"there is no source {name!r} ({known})")
        from pipeline.images.spec.source import SourceSpec

        return _read_named(path, SourceSpec, name)

    @property
    def golden_path(self) -> Path:
        return self.root / "lockfiles" / "golden.yaml"

    def spec(self, name: str) -> ImageFile:
        """One image's spec, for all its platforms; `on` gives that of one platform."""
        path = self.folder(name) / "image.yaml"
        if not path.exists():
            known = there_are(name, self.images())
            raise UnknownImage(f"there is no image {name!r} ({known})")
        from pipeline.images.spec.image import ImageFile

        read = _read_named(path, ImageFile, self.written(name))
        if read.name == name:
            return read
        summary = f"{read.summary}; without compilers"
        return read.model_copy(update={"name": name, "summary": summary})

    def chain(self, name: str, platform: str) -> list[ImageSpec]:
        """The spec for a platform and those it stands on, root first."""
        specs: list[ImageSpec] = []
        seen: list[str] = []
        current: str | None = name
        while current is not None:
            if current in seen:
                raise SpecInvalid(f"{name}: its base images form a loop ({' → '.join(seen)})")
            seen.append(current)
            spec = self.spec(current).on(platform)
            specs.append(spec)
            current = spec.parent
        # what cannot stand on a foreign base is refused before anything is looked up
        for spec in specs[::-1] if specs[-1].foreign is not None else ():
            if spec.debs:
                raise SpecInvalid(
                    f"{spec.name}: debs: cannot be added to a foreign base: it is not known which"
                    " packages it has",
                    "Use `files` and `python`, or an image of this checkout with `debian` as the"
                    " base.",
                )
            if spec.gates:
                raise SpecInvalid(
                    f"{spec.name}: gates: cannot judge an image on a foreign base",
                    "Leave `gates` empty, or use an image of this checkout with `debian` as the"
                    " base.",
                )
        return specs[::-1]

    def series(self, spec: ImageSpec) -> PatchSeries:
        """The image's patches, none if it has no series."""
        from pipeline.images.spec.image import PatchSeries

        if spec.patches is None:
            return PatchSeries(patches=[])
        path = self.folder(spec.name) / spec.patches
        # `build --accept` and `image add-patch` write into it
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise SpecInvalid(
                f"{path}: is a link that leads out of the checkout",
                "Copy the file that it leads to into the checkout.",
            )
        return read_yaml(path, PatchSeries)

    def other_series(self, spec: ImageSpec) -> dict[str, PatchSeries]:
        """Series that lie beside the image's own and can be named in its place."""
        from pipeline.images.spec.image import PatchSeries

        if spec.patches is None:
            return {}
        own = self.folder(spec.name) / spec.patches
        beside = sorted(own.parent.glob("*.yaml"))
        return {path.stem: read_yaml(path, PatchSeries) for path in beside if path != own}


def _read_named(path: Path, model: type[Named], name: str) -> Named:
    """Reads a spec; refuses one whose own name is another than its folder's."""
    spec = read_yaml(path, model)
    # locks, labels and the store go by the name; a copied folder must not pass for the first
    if spec.name != name:
        raise SpecInvalid(f"{path}: name: is {spec.name!r}, its folder is {name!r}")
    return spec


def find_checkout(start: Path) -> Checkout:
    """Finds the checkout around a folder."""
    folder = checkout_above(start)
    if folder is None:
        raise NoCheckout(f"{start}: not inside a checkout (no images/ and lockfiles/ above it)")
    return Checkout(folder)
