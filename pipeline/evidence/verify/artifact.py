"""The artifact to verify: a file, or an image by its blobs. Bytes are read, claims not believed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts.attest.strict import read_signed_json
from pipeline.artifacts.oci.document import (
    GZIP_LAYER,
    MOST_MANIFEST_BYTES,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_MANIFEST,
    PLAIN_LAYER,
    ZSTD_LAYER,
    Descriptor,
    Document,
    read_document,
)
from pipeline.artifacts.oci.reference import DIGEST
from pipeline.core import log
from pipeline.core.errors import EvidenceBroken, RecordInvalid, RegistryBroken, UnknownImage
from pipeline.core.files import on_all_cores, read_limited, sha256_of_file
from pipeline.core.model import sha256_of

# container engines mount at most 127; a manifest of thousands is made to cost time
_MOST_LAYERS = 200
# A field that is not known here could change what another reader makes of the image.
_MANIFEST_FIELDS = frozenset(("schemaVersion", "mediaType", "config", "layers", "annotations"))
_INDEX_FIELDS = frozenset(("schemaVersion", "mediaType", "manifests", "annotations"))
# no `urls` and no `data`: content from elsewhere, or beside the blobs
_DESCRIPTOR_FIELDS = frozenset(
    ("mediaType", "digest", "size", "annotations", "platform", "artifactType")
)
_PLATFORM_FIELDS = frozenset(("architecture", "os", "variant"))
# Nearly always a copy that was cut short; where it is not, the new one is as wrong.
_GET_IT_AGAIN = (
    "Do not use it. Copy the folder again from where it was whole, or make a new one with"
    " `sm120 image export` or `sm120 registry pull`."
)
_MOST_NAMED = 3  # of wrong layers: the fix is the same for all


@dataclass(frozen=True)
class Artifact:
    """Bytes with a digest; of an image also its layers."""

    title: str
    digest: str
    layers: tuple[str, ...] | None = None  # blob digests; none for a plain file
    diff_ids: tuple[str, ...] = ()
    size_bytes: int = 0
    annotations: dict[str, str] = field(default_factory=dict)  # of the manifest: part of its digest
    platform: str = ""  # from the image's config, such as linux/amd64

    @property
    def is_image(self) -> bool:
        return self.layers is not None


def open_file(path: Path) -> Artifact:
    """Opens a plain file; refuses a pipe or a device, which never ends."""
    if not path.is_file():
        raise EvidenceBroken(f"{path}: is not a plain file", "Name a file, a folder or an image.")
    return Artifact(str(path), sha256_of_file(path), size_bytes=path.stat().st_size)


def open_image(blobs: Path, digest: str, title: str, size_bytes: int | None = None) -> Artifact:
    """An image whose blobs are in a folder, named by digest."""
    what = f"{title}: manifest"
    manifest = _document(read_small(blobs, digest, size_bytes, what), what)
    config = require_manifest(manifest, title)
    part = f"{title}: {manifest.part(config.digest)}"
    settings = read_small(blobs, config.digest, config.size_bytes, part)
    artifact = make_artifact(title, manifest, settings)
    # last, as it takes longest: an image that contradicts itself is refused before
    # an image may have one layer twice
    layers = {x.digest: x for x in manifest.layers}
    # the largest first: started last, it would run alone at the end
    ranked = sorted(layers.values(), key=lambda x: x.size_bytes, reverse=True)
    wrong: dict[str, str] = {}
    with log.progress("read", sum(x.size_bytes for x in ranked)) as bar:

        def require(layer: Descriptor) -> None:
            digest, what = layer.digest, manifest.part(layer.digest)
            try:
                path = _blob(blobs, digest, what)
                size = path.stat().st_size
                _require_same(what, digest, layer.size_bytes, size, lambda: sha256_of_file(path))
            except EvidenceBroken as error:
                wrong[digest] = str(error)
            bar.advance(layer.size_bytes)

        on_all_cores(require, ranked)
    if wrong:
        named = [wrong[each] for each in layers if each in wrong]
        more = f"; and {len(named) - _MOST_NAMED} more" if named[_MOST_NAMED:] else ""
        raise EvidenceBroken(f"{title}: {'; '.join(named[:_MOST_NAMED])}{more}", _GET_IT_AGAIN)
    return artifact


def open_layout(folder: Path, platform: str | None = None) -> Artifact:
    """An image in an OCI layout folder; every blob is read and compared with its name."""
    blobs = folder / "blobs" / "sha256"
    listed: list[Descriptor] = []
    for entry in read_layout_index(folder).manifests:
        # `docker buildx` writes an index of platforms inside the index of the folder, no deeper
        if entry.media_type == OCI_INDEX:
            what = f"{folder.name}: index of platforms"
            listed += _index(
                read_small(blobs, entry.digest, entry.size_bytes, what), what
            ).manifests
        else:
            listed.append(entry)
    # evidence that was pulled along has an artifact type, an image has none
    held = [d for d in listed if d.artifact_type is None and d.media_type == OCI_MANIFEST]
    images = [d for d in held if platform in (None, _without_variant(d.platform))]
    if len(images) != 1:
        # --platform helps only where platforms differ
        others = sorted({_without_variant(d.platform) for d in held if d.platform} - {platform})
        hint = "Name a layout that holds one image for the platform."
        if others and (platform or len(others) > 1):
            hint = f"It holds images for {', '.join(others)}: choose one with --platform."
        which = f" for {platform}" if platform else ""
        raise UnknownImage(f"{folder}: holds {len(images)} images{which}", hint)
    (chosen,) = images
    artifact = open_image(blobs, chosen.digest, folder.name, chosen.size_bytes)
    require_platform(artifact, chosen.platform)
    return artifact


def read_layout_index(folder: Path) -> Document:
    """The index of an OCI layout folder."""
    # the index is the one file of a layout that no digest names
    if not os.path.lexists(folder / "index.json"):
        raise EvidenceBroken(f"{folder.name}: index.json is missing", _GET_IT_AGAIN)
    _require_inside(folder, folder / "index.json")
    return _index(read_bounded(folder / "index.json"), f"{folder.name}/index.json")


def _without_variant(platform: str | None) -> str:
    # configs of arm64 name their variant or not; nothing is built for one
    return "/".join((platform or "").split("/")[:2])


def _document(data: bytes, what: str) -> Document:
    try:
        return read_document(data)
    except RegistryBroken as error:
        # its name here, in place of the digest of whatever it holds
        reason = str(error).partition(": ")[2]
        raise RecordInvalid(f"{what}: {reason}", _GET_IT_AGAIN) from error


def _index(data: bytes, what: str) -> Document:
    index = _document(data, what)
    if index.media_type != OCI_INDEX:
        raise RecordInvalid(f"{what}: is a {index.media_type}, not an OCI index")
    _require_closed(index, _INDEX_FIELDS, what)
    return index


def require_manifest(document: Document, title: str) -> Descriptor:
    """The config of a plain OCI image manifest without unknown fields; refuses anything else."""
    what = f"{title}: manifest"
    if document.media_type != OCI_MANIFEST:
        raise RecordInvalid(f"{what}: is a {document.media_type}, not an OCI image manifest")
    # without it the same bytes can be read as an index, too: CVE-2021-41190
    if "mediaType" not in _require_closed(document, _MANIFEST_FIELDS, what):
        raise RecordInvalid(f"{what}: does not name its media type")
    if not 1 <= len(document.layers) <= _MOST_LAYERS:
        raise RecordInvalid(f"{what}: has {len(document.layers)} layers, not 1 to {_MOST_LAYERS}")
    config = document.config
    if config is None or config.media_type != OCI_CONFIG:
        raise EvidenceBroken(
            f"{title}: its config is a {config.media_type if config else 'missing'}"
        )
    return config


def _require_closed(document: Document, fields: frozenset[str], what: str) -> dict[str, Any]:
    body: dict[str, Any] = read_signed_json(document.data, what)
    descriptors = [*body.get("layers", []), *body.get("manifests", [])]
    descriptors += [body["config"]] if "config" in body else []
    platforms = [x["platform"] for x in descriptors if x.get("platform") is not None]
    checks = [(body, fields), *((x, _DESCRIPTOR_FIELDS) for x in descriptors)]
    for values, known in (*checks, *((x, _PLATFORM_FIELDS) for x in platforms)):
        if not isinstance(values, dict):
            raise RecordInvalid(f"{what}: holds {str(values)[:40]!r} instead of an object")
        if unknown := sorted(values.keys() - known):
            raise RecordInvalid(f"{what}: has the unknown field {unknown[0]!r}")
    return body


def make_artifact(title: str, manifest: Document, config: bytes) -> Artifact:
    """An image whose manifest and config do not contradict each other."""
    settings = read_signed_json(config, "config")
    try:
        diff_ids = tuple(settings["rootfs"]["diff_ids"])
    except (KeyError, TypeError) as error:
        raise RecordInvalid(f"{title}: its config names no diffIDs") from error
    if not all(isinstance(x, str) and DIGEST.fullmatch(x) for x in diff_ids):
        raise RecordInvalid(f"{title}: its config names a diffID that is not a digest")
    layers = manifest.layers
    if len(diff_ids) != len(layers):
        raise EvidenceBroken(f"{title}: {len(layers)} layers, but {len(diff_ids)} in its config")
    # others cannot be unpacked: of layers that may not be redistributed no bytes are here
    for layer in layers:
        if layer.media_type not in (GZIP_LAYER, ZSTD_LAYER, PLAIN_LAYER):
            raise EvidenceBroken(f"{title}: the layer {layer.digest} is a {layer.media_type}")
    return Artifact(
        title=title,
        digest=manifest.digest,
        layers=tuple(x.digest for x in layers),
        diff_ids=diff_ids,
        size_bytes=sum(layer.size_bytes for layer in layers),
        annotations=manifest.annotations,
        platform=f"{settings.get('os')}/{settings.get('architecture')}",
    )


def require_platform(artifact: Artifact, listed: str | None) -> None:
    """Refuse an image that an index lists for another platform than its own config names."""
    if listed is not None and _without_variant(listed) != artifact.platform:
        message = f"{artifact.title}: is listed for {listed}, but is for {artifact.platform}"
        raise EvidenceBroken(message)


def read_bounded(path: Path, most_bytes: int = MOST_MANIFEST_BYTES) -> bytes:
    """A file that must be small."""
    return read_limited(path, most_bytes, EvidenceBroken, too_large=RecordInvalid)


def read_small(
    blobs: Path, digest: str, size_bytes: int | None, what: str, most: int = MOST_MANIFEST_BYTES
) -> bytes:
    """A small blob of a folder, compared with its name; `what` is its name in an error."""
    data = read_bounded(_blob(blobs, digest, what), most)
    _require_same(what, digest, size_bytes, len(data), lambda: sha256_of(data))
    return data


def _require_same(
    what: str, digest: str, want_bytes: int | None, got_bytes: int, hash_it: Callable[[], str]
) -> None:
    # the size first: a glance, where hashing may take minutes
    difference = f"has {got_bytes} bytes instead of {want_bytes}"
    if want_bytes in (None, got_bytes):
        got = hash_it()
        difference = f"is really {got}" if got != digest else ""
    if difference:
        raise EvidenceBroken(f"{what} is damaged: {digest} {difference}", _GET_IT_AGAIN)


def _blob(blobs: Path, digest: str, what: str) -> Path:
    path = blobs / digest.removeprefix("sha256:")
    if not os.path.lexists(path):
        raise EvidenceBroken(f"{what} is missing: there is no {path}", _GET_IT_AGAIN)
    _require_inside(blobs.parent.parent, path)
    return path


def _require_inside(root: Path, path: Path) -> None:
    """Require plain files and folders all the way: a link could show bytes from elsewhere."""
    below = path.relative_to(root)
    for place in (root / each for each in [*reversed(below.parents[:-1]), below]):
        try:
            mode = place.lstat().st_mode
        except OSError as error:
            raise EvidenceBroken(f"{place}: {error.strerror}") from error
        if not (stat.S_ISREG(mode) if place == path else stat.S_ISDIR(mode)):
            raise EvidenceBroken(f"{place}: is a link or not a plain file")
