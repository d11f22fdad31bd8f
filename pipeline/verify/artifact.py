"""What is verified: a file, or an image by its blobs. Bytes are read, never claims."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from pipeline import log
from pipeline.attest.strict import as_model, read_json
from pipeline.errors import EvidenceBroken, RecordInvalid
from pipeline.files import read_at_most, sha256_of_file
from pipeline.model import Digest, Frozen, sha256_of
from pipeline.oci.document import GZIP_LAYER, OCI_CONFIG, PLAIN_LAYER

_MOST_MANIFEST_BYTES = 4 << 20
_MOST_LAYERS = 200


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
    platform: str = ""  # as an image's config says, such as linux/amd64

    @property
    def is_image(self) -> bool:
        return self.layers is not None


def open_file(path: Path) -> Artifact:
    """A plain file by its bytes; of a pipe or a device there is no last one."""
    if not path.is_file():
        raise EvidenceBroken(f"{path}: is no plain file", "Name a file, a folder or an image.")
    return Artifact(str(path), sha256_of_file(path), size_bytes=path.stat().st_size)


def open_image(blobs: Path, digest: str, title: str, size_bytes: int | None = None) -> Artifact:
    """An image whose blobs lie in a folder by digest."""
    manifest = read_manifest(read_small(blobs, digest, size_bytes), title)
    config = read_small(blobs, manifest.config.digest, manifest.config.size)
    artifact = make_artifact(title, digest, manifest, config)
    _require_blobs(blobs, manifest.layers)
    return artifact


def read_manifest(data: bytes, title: str) -> Manifest:
    """An image's manifest, closed: what it says beyond that is not taken for harmless."""
    manifest = as_model(Manifest, read_json(data, title), f"{title}: manifest")
    if manifest.config.media_type != OCI_CONFIG:
        raise EvidenceBroken(f"{title}: its config is a {manifest.config.media_type}")
    return manifest


def make_artifact(title: str, digest: str, manifest: Manifest, config: bytes) -> Artifact:
    """An image whose manifest and config do not contradict each other."""
    said = read_json(config, "config")
    diff_ids = _diff_ids(said, title)
    if len(diff_ids) != len(manifest.layers):
        raise EvidenceBroken(
            f"{title}: {len(manifest.layers)} layers, but {len(diff_ids)} in its config"
        )
    for layer in manifest.layers:
        if layer.media_type not in (GZIP_LAYER, PLAIN_LAYER):
            raise EvidenceBroken(f"{title}: the layer {layer.digest} is a {layer.media_type}")
    return Artifact(
        title=title,
        digest=digest,
        layers=tuple(x.digest for x in manifest.layers),
        diff_ids=diff_ids,
        size_bytes=sum(layer.size for layer in manifest.layers),
        notes=manifest.annotations,
        platform=f"{said.get('os')}/{said.get('architecture')}",
    )


def require_platform(artifact: Artifact, listed: str | None) -> None:
    """Refuse an image that an index lists for another platform than it says itself it is for."""
    if listed is not None and listed.split("/")[:2] != artifact.platform.split("/"):
        raise EvidenceBroken(
            f"{artifact.title}: is listed for {listed}, but is for {artifact.platform}"
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


def read_bounded(path: Path, most_bytes: int = _MOST_MANIFEST_BYTES) -> bytes:
    """A file that must be small."""
    try:
        data = read_at_most(path, most_bytes)
    except OSError as error:
        raise EvidenceBroken(f"{path}: cannot be read: {error.strerror}") from error
    if data is None:
        raise RecordInvalid(f"{path.name}: larger than {most_bytes} bytes")
    return data


def read_small(
    blobs: Path, digest: str, size_bytes: int | None, most_bytes: int = _MOST_MANIFEST_BYTES
) -> bytes:
    """A small blob of a folder, if it is what its name says."""
    path = _blob(blobs, digest)
    data = read_bounded(path, most_bytes)
    if size_bytes is not None and len(data) != size_bytes:
        raise EvidenceBroken(f"{digest}: {len(data)} bytes instead of {size_bytes}")
    if (got := sha256_of(data)) != digest:
        raise EvidenceBroken(f"the blob {digest} is really {got}")
    return data


def _require_blobs(blobs: Path, wanted: list[Descriptor]) -> None:
    """Read all layers on all cores, the largest first; the first that is wrong is told."""
    ranked = sorted(wanted, key=lambda x: x.size, reverse=True)
    with (
        log.progress("read", sum(x.size for x in wanted)) as bar,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):

        def require(wanted: Descriptor) -> None:
            _require_blob(blobs, wanted)
            bar.advance(wanted.size)

        try:
            list(pool.map(require, ranked))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _require_blob(blobs: Path, wanted: Descriptor) -> None:
    path = _blob(blobs, wanted.digest)
    size = path.stat().st_size
    if size != wanted.size:
        raise EvidenceBroken(f"{wanted.digest}: {size} bytes instead of {wanted.size}")
    if (got := sha256_of_file(path)) != wanted.digest:
        raise EvidenceBroken(f"the blob {wanted.digest} is really {got}")


def _blob(blobs: Path, digest: str) -> Path:
    path = blobs / digest.removeprefix("sha256:")
    require_inside(blobs.parent.parent, path)
    return path


def require_inside(root: Path, path: Path) -> None:
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
