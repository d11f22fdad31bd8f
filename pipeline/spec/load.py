"""Reading specs from the checkout."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.errors import SpecInvalid, UnknownImage
from pipeline.files import read_at_most

if TYPE_CHECKING:  # slow to load, and weights need none of it
    from pipeline.spec.image import ImageSpec, PatchSeries

Model = TypeVar("Model", bound=BaseModel)


MAX_FILE_BYTES = 8 << 20
MAX_DEPTH = 32
_FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeys(_FastLoader):  # type: ignore[misc, valid-type]
    """YAML in which a key written twice is an error, not a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        doubled = [key for key, times in Counter(map(repr, keys)).items() if times > 1]
        if doubled:
            raise yaml.YAMLError(f"key {doubled[0]} is there twice")
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


def read_yaml(path: Path, model: type[Model]) -> Model:
    """A file as a closed model, or an error that names the file and the field."""
    try:
        text = _read_text(path)
        _require_plain(text)
        value = yaml.load(text, Loader=_UniqueKeys)  # noqa: S506
    # besides its own errors, PyYAML lets those of int(), float() and date() through
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise SpecInvalid(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise SpecInvalid(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"]) or "the file"
        raise SpecInvalid(f"{path}: {field}: {first['msg']}") from error


def _read_text(path: Path) -> str:
    data = read_at_most(path, MAX_FILE_BYTES)
    if data is None:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    return data.decode("utf-8")


def _require_plain(text: str) -> None:
    """No aliases, which can unfold without end, and no depth that overflows the C parser."""
    depth = 0
    for event in yaml.parse(text, Loader=_FastLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"*{event.anchor}: write it out, aliases are not allowed")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} levels deep")


@dataclass(frozen=True)
class Checkout:
    """A folder with `images/` and `lockfiles/`: the user's checkout."""

    root: Path

    def images(self) -> list[str]:
        """All image names, sorted."""
        return sorted(p.parent.name for p in (self.root / "images").glob("*/image.yaml"))

    def folder(self, name: str) -> Path:
        return self.root / "images" / name

    def lock_path(self, name: str, platform: str) -> Path:
        architecture = platform.partition("/")[2]
        return self.root / "lockfiles" / "images" / f"{name}.{architecture}.lock.yaml"

    @property
    def golden_path(self) -> Path:
        return self.root / "lockfiles" / "golden.yaml"

    def spec(self, name: str) -> ImageSpec:
        """One image's spec."""
        from pipeline.spec.image import ImageSpec

        path = self.folder(name) / "image.yaml"
        if not path.exists():
            known = ", ".join(self.images()) or "none"
            raise UnknownImage(f"there is no image {name!r} (there are: {known})")
        spec = read_yaml(path, ImageSpec)
        if spec.name != name:
            raise SpecInvalid(f"{path}: name: is {spec.name!r}, its folder is {name!r}")
        return spec

    def chain(self, name: str) -> list[ImageSpec]:
        """The spec and those it stands on, root first."""
        from pipeline.spec.base import require_supported

        specs: list[ImageSpec] = []
        seen: list[str] = []
        current: str | None = name
        while current is not None:
            if current in seen:
                raise SpecInvalid(f"{name}: its base leads back to itself ({' → '.join(seen)})")
            seen.append(current)
            spec = self.spec(current)
            specs.append(spec)
            current = spec.parent
        require_supported(specs[::-1])
        return specs[::-1]

    def series(self, spec: ImageSpec) -> PatchSeries:
        """The image's patches, none if it has no series."""
        from pipeline.spec.image import PatchSeries

        if spec.patches is None:
            return PatchSeries(patches=[])
        return read_yaml(self.folder(spec.name) / spec.patches, PatchSeries)

    def other_series(self, spec: ImageSpec) -> dict[str, PatchSeries]:
        """Series that lie beside the image's own and can be named in its place."""
        from pipeline.spec.image import PatchSeries

        if spec.patches is None:
            return {}
        own = self.folder(spec.name) / spec.patches
        beside = sorted(own.parent.glob("*.yaml"))
        return {path.stem: read_yaml(path, PatchSeries) for path in beside if path != own}


def find_checkout(start: Path) -> Checkout:
    """The nearest folder upwards that has `images/`."""
    for folder in [start, *start.parents]:
        if (folder / "images").is_dir() and (folder / "lockfiles").is_dir():
            return Checkout(folder)
    raise UnknownImage(
        f"{start}: not inside a checkout (no images/ and lockfiles/ above it)",
        "Run it in the checkout, or name it with --checkout.",
    )


def schema(model: type[BaseModel]) -> str:
    """The JSON schema an editor needs to complete and check a file."""
    return json.dumps(model.model_json_schema(by_alias=True), indent=2, sort_keys=True) + "\n"
