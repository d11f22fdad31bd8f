"""Foreign base images: looked up once for a lock, then brought into the store by digest.

A lock names no place, so any folder or registry that has the right bytes will do: folders that
hold blobs by hash (an OCI layout is one), then the configured registries, in order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline.artifacts.oci import document as oci
from pipeline.artifacts.oci.config import MOST_CONFIG_BYTES, read_image_config
from pipeline.artifacts.oci.reference import parse_repository
from pipeline.artifacts.registry.client import RegistryClient
from pipeline.artifacts.registry.pull import MOST_BYTES, WantedImage, choose, pull_into
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log
from pipeline.core.files import is_whole, os_errors_explained, sha256_of_file
from pipeline.core.model import sha256_of
from pipeline.core.net.address import without_controls
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.lock.model import MOST_LAYERS, BasePin, BlobPin, LayerPin
from pipeline.images.spec.image import ForeignBase

Result = TypeVar("Result")
# Failures of one registry after which the next one is asked.
_ELSEWHERE = (
    errors.NotInRegistry,
    errors.RegistryUnreachable,
    errors.RegistryRefused,
    errors.RegistryBroken,
)
# The same bytes by Docker's names and by OCI's.
_LAYERS: dict[str, oci.LayerType] = {
    oci.GZIP_LAYER: oci.GZIP_LAYER,
    oci.ZSTD_LAYER: oci.ZSTD_LAYER,
    oci.PLAIN_LAYER: oci.PLAIN_LAYER,
    oci.DOCKER_GZIP_LAYER: oci.GZIP_LAYER,
    oci.DOCKER_ZSTD_LAYER: oci.ZSTD_LAYER,
    oci.DOCKER_PLAIN_LAYER: oci.PLAIN_LAYER,
}
_CONFIGS = (oci.OCI_CONFIG, oci.DOCKER_CONFIG)


class Bases:
    """Brings foreign bases into the store."""

    def __init__(self, store: Store, settings: BaseSettings, *, offline: bool = False) -> None:
        self._store, self._settings, self._offline = store, settings, offline
        self._open: dict[str, Repository] = {}

    def resolve(self, base: ForeignBase, platform: str) -> BasePin:
        """Resolves the base for one platform, with the digest of every part; reads no layers."""
        root = self._document(base.repository, base.digest)
        manifest = root
        if root.kind == "index":
            entry = choose(root, platform)
            manifest = self._document(base.repository, entry.digest)
            if manifest.kind != "manifest" or len(manifest.data) != entry.size_bytes:
                raise errors.BaseUnusable(f"{base}: {entry.digest} does not match its index")
        config = manifest.config
        # what has no config is an artifact of another kind
        if config is None or config.media_type not in _CONFIGS or not config.size_bytes:
            kind = config.media_type if config else oci.OCI_EMPTY
            raise errors.BaseUnusable(
                f"{base}: is not an image: its config is a {without_controls(kind)}"
            )
        most_bytes = MOST_CONFIG_BYTES
        data = self._small(
            base.repository, config.digest, most_bytes, lambda r: r.read_blob(config, most_bytes)
        )
        inside = read_image_config(data)
        if inside.platform != platform:
            message = f"{base}: is for {without_controls(inside.platform)}, not for {platform}"
            raise errors.BaseUnusable(message)
        diff_ids, n_layers = inside.rootfs.diff_ids, len(manifest.layers)
        if len(diff_ids) != n_layers:
            message = f"{base}: {n_layers} layers, but {len(diff_ids)} in its config"
            raise errors.BaseUnusable(message)
        # here and not when the image is run: overlayfs mounts only so many
        if n_layers > MOST_LAYERS:
            message = f"{base}: {n_layers} layers, at most {MOST_LAYERS} can be mounted"
            raise errors.BaseUnusable(message)
        layers = []
        for layer, diff_id in zip(manifest.layers, diff_ids, strict=True):
            size, kind = layer.size_bytes, layer.media_type
            media_type = _LAYERS.get(kind)
            what = f"{base}: the layer {layer.digest} is a {without_controls(kind)}"
            # what cannot be unpacked cannot be checked
            if media_type is not None and size:
                pin = LayerPin(
                    digest=layer.digest, diff_id=diff_id, size_bytes=size, media_type=media_type
                )
                layers.append(pin)
            elif "foreign" in kind or "nondistributable" in kind:
                raise errors.BaseUnusable(f"{what}, which registries may not distribute")
            else:
                raise errors.BaseUnusable(f"{what} of {size} bytes, which is not supported")
        return BasePin(
            repository=base.repository,
            index=_pin(root.descriptor) if root.kind == "index" else None,
            manifest=_pin(manifest.descriptor),
            config=_pin(config),
            layers=layers,
        )

    def bring(self, pin: BasePin) -> None:
        """Brings a locked base's documents and blobs into the store; asks only for missing ones."""
        index = self._document(pin.repository, pin.index.digest) if pin.index else None
        manifest = self._document(pin.repository, pin.manifest.digest)
        # the documents name what the lock names: a lock written by hand is refused here
        if index is not None and pin.manifest.digest not in {d.digest for d in index.manifests}:
            raise errors.BaseUnusable(f"{pin}: is not listed in {index.digest}")
        named = [(d.digest, d.size_bytes) for d in (manifest.config, *manifest.layers) if d]
        if named != [(d.digest, d.size_bytes) for d in (pin.config, *pin.layers)]:
            raise errors.BaseUnusable(f"{pin}: its manifest names other parts than the lock")
        # byte for byte as they came: their digests are what the lock and the evidence name
        for document in (*([index] if index else []), manifest):
            self._store.put_blob(document.data)
        missing = [
            blob
            for blob in pin.blobs
            if not is_whole(self._store.blob_path(blob.digest), blob.digest, blob.size_bytes)
        ]
        self._store.need_space(sum(b.size_bytes for b in missing))
        digests, n_layers = [layer.digest for layer in pin.layers], len(pin.layers)
        parts = {d: f"layer {digests.index(d) + 1} of {n_layers}" for d in digests}
        # after the question of space: copies from a folder need as much as downloads
        missing = [b for b in missing if not self._copied(b, parts.get(b.digest, "config"))]
        if not missing:
            return
        if self._offline:
            raise errors.OfflineMiss(
                f"{pin}: {len(missing)} of its {len(pin.blobs)} blobs are not in the store:"
                f" {', '.join(parts.get(blob.digest, 'config') for blob in missing)}"
            )
        wanted = WantedImage(root=manifest, documents=(manifest,))
        if wanted.size_bytes > MOST_BYTES:
            raise errors.BaseUnusable(
                f"{pin}: claims to have {wanted.size_bytes} bytes, which is too much"
            )
        self._from_registries(
            pin.repository,
            str(pin),
            lambda there: pull_into(there, wanted, self._store, self._settings.jobs),
        )

    def _document(self, repository: str, digest: str) -> oci.Document:
        """A manifest or index by its digest."""
        data = self._small(
            repository, digest, oci.MOST_MANIFEST_BYTES, lambda there: there.manifest(digest).data
        )
        return oci.read_document(data)

    def _small(
        self, repository: str, digest: str, most_bytes: int, ask: Callable[[Repository], bytes]
    ) -> bytes:
        """A small blob from the nearest place that has it: the store, a folder, a registry."""
        for path in [self._store.blob_path(digest), *self._in_folders(digest)]:
            is_small = path.is_file() and path.stat().st_size <= most_bytes
            if is_small and sha256_of(data := path.read_bytes()) == digest:
                return data
        name = f"{repository}@{digest}"
        if self._offline:
            raise errors.OfflineMiss(f"{name}: this part of the base image is not in the store")
        return self._from_registries(repository, name, ask)

    def _in_folders(self, digest: str) -> list[Path]:
        name = digest.removeprefix("sha256:")
        # flat, as `sm120 image collect` writes them, and as an OCI layout does
        places = (Path(name), Path("sha256") / name, Path("blobs") / "sha256" / name)
        return [folder / place for folder in self._settings.folders for place in places]

    def _copied(self, blob: BlobPin, part: str) -> bool:
        """Copies the blob if a folder has it; judges its bytes like any others."""
        for path in self._in_folders(blob.digest):
            if not path.is_file():
                continue
            if path.stat().st_size == blob.size_bytes:
                with self._store.new_blob() as new:
                    with os_errors_explained(new.path):
                        shutil.copyfile(path, new.path)
                    if sha256_of_file(new.path) == blob.digest:
                        new.keep(blob.digest)
                        return True
            # looked for elsewhere, but who named the folder should know to copy it again
            log.say(f"{path}, {part} of the base image, is damaged and was not taken")
        return False

    def _from_registries(
        self, repository: str, what: str, ask: Callable[[Repository], Result]
    ) -> Result:
        """Returns the first good answer of a registry; else raises the most telling failure."""
        if not self._settings.registries:
            raise errors.BaseUnplaced(f"{what}: no registry is configured that could have it")
        failures: list[errors.PipelineError] = []
        for place in self._settings.registries:
            name = f"{place.rstrip('/')}/{repository}"
            try:
                if name not in self._open:
                    reference = parse_repository(name)
                    client = RegistryClient(reference, self._settings.access)
                    self._open[name] = Repository(client, reference.repository)
                return ask(self._open[name])
            except _ELSEWHERE as error:
                failures.append(error)
        # a registry that lies matters more than one that does not answer
        broken = [f for f in failures if isinstance(f, errors.RegistryBroken)]
        if broken or len(failures) == 1:
            raise (broken or failures)[0]
        raise errors.SourceUnreachable(f"{what}: {'; '.join(str(f) for f in failures)}")


def _pin(blob: oci.Descriptor) -> BlobPin:
    return BlobPin(digest=blob.digest, size_bytes=blob.size_bytes)
