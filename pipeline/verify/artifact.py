"""What is verified: a file, or an image as an OCI layout. Its bytes are read, never its claims."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from pipeline.build.oci import CONFIG, LAYER, MANIFEST
from pipeline.errors import EvidenceBroken, RecordInvalid, UnknownImage
from pipeline.model import Digest, Frozen, sha256_of
from pipeline.record.strict import read_json

INDEX = "application/vnd.oci.image.index.v1+json"
_MOST_MANIFEST_BYTES = 4 << 20
_MOST_LAYERS = 200
Model = TypeVar("Model", bound=Frozen)


class PlatformName(Frozen):
    """Which machine an image is for."""

    architecture: str
    os: str
    variant: str | None = None


class Descriptor(Frozen):
    """A blob by digest, as OCI names it."""

    media_type: str = Field(alias="mediaType")
    digest: Digest
    size: int = Field(ge=0)
    annotations: dict[str, str] = {}
    platform: PlatformName | None = None
    artifact_type: str | None = Field(default=None, alias="artifactType")


class Index(Frozen):
    """A layout's list of images."""

    schema_version: Literal[2] = Field(alias="schemaVersion")
    media_type: Literal["application/vnd.oci.image.index.v1+json"] = Field(
        default="application/vnd.oci.image.index.v1+json", alias="mediaType"
    )
    manifests: list[Descriptor]
    annotations: dict[str, str] = {}


class Manifest(Frozen):
    """An image's manifest."""

    schema_version: Literal[2] = Field(alias="schemaVersion")
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = Field(alias="mediaType")
    config: Descriptor
    layers: list[Descriptor] = Field(min_length=1, max_length=_MOST_LAYERS)
    annotations: dict[str, str] = {}


@dataclass(frozen=True)
class Artifact:
    """Bytes with a digest; of an image also its layers."""

    title: str
    digest: str
    layers: tuple[str, ...] | None = None  # blob digests; none for a plain file
    diff_ids: tuple[str, ...] = ()
    size_bytes: int = 0
    notes: dict[str, str] = field(default_factory=dict)  # a manifest's annotations: part of it

    @property
    def is_image(self) -> bool:
        return self.layers is not None


def open_file(path: Path) -> Artifact:
    """A plain file by its bytes."""
    with path.open("rb") as handle:
        digest = "sha256:" + hashlib.file_digest(handle, "sha256").hexdigest()
    return Artifact(str(path), digest, size_bytes=path.stat().st_size)


def open_layout(folder: Path, platform: str | None = None) -> Artifact:
    """An image in a layout folder; every blob is read and compared with its name."""
    _require_inside(folder, folder / "index.json")
    index = _model(Index, read_bounded(folder / "index.json"), f"{folder.name}/index.json")
    images = [d for d in _listed(folder, index) if d.media_type == MANIFEST]
    if platform is not None:
        images = [d for d in images if d.platform and _platform(d.platform) == platform]
    if len(images) != 1:
        raise UnknownImage(
            f"{folder}: holds {len(images)} images{f' for {platform}' if platform else ''}",
            "Choose one with --platform.",
        )
    return open_image(folder / "blobs" / "sha256", images[0].digest, folder.name, images[0].size)


def _listed(folder: Path, index: Index) -> list[Descriptor]:
    """What an index names, also through an index of platforms, but no deeper."""
    found: list[Descriptor] = []
    for each in index.manifests:
        if each.media_type == INDEX:
            data = _small(folder / "blobs" / "sha256", each.digest, each.size)
            found += _model(Index, data, f"{folder.name}: index of platforms").manifests
        else:
            found.append(each)
    return found


def _platform(found: PlatformName) -> str:
    return f"{found.os}/{found.architecture}"


def open_image(blobs: Path, digest: str, title: str, size_bytes: int | None = None) -> Artifact:
    """An image whose blobs lie in a folder by digest."""
    data = _small(blobs, digest, size_bytes)
    manifest = _model(Manifest, data, f"{title}: manifest")
    if manifest.config.media_type != CONFIG:
        raise EvidenceBroken(f"{title}: its config is a {manifest.config.media_type}")
    config = read_json(_small(blobs, manifest.config.digest, manifest.config.size), "config")
    diff_ids = _diff_ids(config, title)
    if len(diff_ids) != len(manifest.layers):
        raise EvidenceBroken(
            f"{title}: {len(manifest.layers)} layers, but {len(diff_ids)} in its config"
        )
    for layer in manifest.layers:
        if layer.media_type != LAYER:
            raise EvidenceBroken(f"{title}: the layer {layer.digest} is a {layer.media_type}")
    _require_blobs(blobs, manifest.layers)
    return Artifact(
        title=title,
        digest=digest,
        layers=tuple(x.digest for x in manifest.layers),
        diff_ids=diff_ids,
        size_bytes=sum(layer.size for layer in manifest.layers),
        notes=manifest.annotations,
    )


def _diff_ids(config: Any, title: str) -> tuple[str, ...]:
    try:
        found = config["rootfs"]["diff_ids"]
        return tuple(_Digests.model_validate({"digests": found}).digests)
    except (KeyError, TypeError, ValidationError) as error:
        raise RecordInvalid(f"{title}: its config names no diffIDs") from error


class _Digests(Frozen):
    """A list of digests."""

    digests: list[Digest]


def _model(model: type[Model], data: bytes, what: str) -> Model:
    try:
        return model.model_validate(read_json(data, what))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"]) or "the file"
        raise RecordInvalid(f"{what}: {field}: {first['msg']}") from error


def read_bounded(path: Path, most_bytes: int = _MOST_MANIFEST_BYTES) -> bytes:
    """A file that must be small."""
    try:
        with path.open("rb") as handle:
            data = handle.read(most_bytes + 1)
    except OSError as error:
        raise EvidenceBroken(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > most_bytes:
        raise RecordInvalid(f"{path.name}: larger than {most_bytes} bytes")
    return data


def _small(blobs: Path, digest: str, size_bytes: int | None) -> bytes:
    path = _blob(blobs, digest)
    data = read_bounded(path)
    if size_bytes is not None and len(data) != size_bytes:
        raise EvidenceBroken(f"{digest}: {len(data)} bytes instead of {size_bytes}")
    if (got := sha256_of(data)) != digest:
        raise EvidenceBroken(f"the blob {digest} is really {got}")
    return data


def _require_blobs(blobs: Path, wanted: list[Descriptor]) -> None:
    """Read all layers on all cores, the largest first; the first that is wrong is told."""
    ranked = sorted(wanted, key=lambda x: x.size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            list(pool.map(lambda x: _require_blob(blobs, x), ranked))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _require_blob(blobs: Path, wanted: Descriptor) -> None:
    path = _blob(blobs, wanted.digest)
    size = path.stat().st_size
    if size != wanted.size:
        raise EvidenceBroken(f"{wanted.digest}: {size} bytes instead of {wanted.size}")
    with path.open("rb") as handle:
        got = "sha256:" + hashlib.file_digest(handle, "sha256").hexdigest()
    if got != wanted.digest:
        raise EvidenceBroken(f"the blob {wanted.digest} is really {got}")


def _blob(blobs: Path, digest: str) -> Path:
    path = blobs / digest.removeprefix("sha256:")
    _require_inside(blobs.parent.parent, path)
    return path


def _require_inside(root: Path, path: Path) -> None:
    """Plain files and folders all the way: a link could show bytes from elsewhere."""
    for each in [*reversed(path.relative_to(root).parents[:-1]), path.relative_to(root)]:
        place = root / each
        try:
            mode = place.lstat().st_mode
        except OSError as error:
            raise EvidenceBroken(f"{place}: {error.strerror}") from error
        wanted = stat.S_ISREG(mode) if place == path else stat.S_ISDIR(mode)
        if not wanted:
            raise EvidenceBroken(f"{place}: is a link or no plain file")
