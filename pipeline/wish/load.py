"""Reading wishes from the checkout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.errors import UnknownImage, WishInvalid
from pipeline.wish.image import ImageWish, PatchSeries

Model = TypeVar("Model", bound=BaseModel)


class _UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML in which a key written twice is an error, not a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        doubled = sorted({str(k) for k in keys if keys.count(k) > 1})
        if doubled:
            raise yaml.YAMLError(f"key {doubled[0]!r} is there twice")
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


def read_yaml(path: Path, model: type[Model]) -> Model:
    """A file as a closed model, or an error that names the file and the field."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise WishInvalid(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except FileNotFoundError as error:
        raise WishInvalid(f"{path}: no such file") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"]) or "the file"
        raise WishInvalid(f"{path}: {field}: {first['msg']}") from error


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

    def wish(self, name: str) -> ImageWish:
        """One image's wish."""
        path = self.folder(name) / "image.yaml"
        if not path.exists():
            known = ", ".join(self.images()) or "none"
            raise UnknownImage(f"there is no image {name!r} (there are: {known})")
        wish = read_yaml(path, ImageWish)
        if wish.name != name:
            raise WishInvalid(f"{path}: name: is {wish.name!r}, its folder is {name!r}")
        return wish

    def chain(self, name: str) -> list[ImageWish]:
        """The wish and those it stands on, root first."""
        wishes: list[ImageWish] = []
        seen: list[str] = []
        current: str | None = name
        while current is not None:
            if current in seen:
                raise WishInvalid(f"{name}: its base leads back to itself ({' → '.join(seen)})")
            seen.append(current)
            wish = self.wish(current)
            wishes.append(wish)
            current = wish.base
        return wishes[::-1]

    def series(self, wish: ImageWish) -> PatchSeries:
        """The image's patches, none if it has no series."""
        if wish.patches is None:
            return PatchSeries(patches=[])
        return read_yaml(self.folder(wish.name) / wish.patches, PatchSeries)


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
