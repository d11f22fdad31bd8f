"""The documents of a foreign base as pins of a lock; what cannot be a base is refused."""

from __future__ import annotations

from pipeline.errors import BaseUnusable
from pipeline.lock.model import MOST_LAYERS, BasePin, BlobPin, LayerPin
from pipeline.net.address import clean
from pipeline.oci.config import ImageConfig
from pipeline.oci.document import (
    DOCKER_CONFIG,
    DOCKER_GZIP_LAYER,
    DOCKER_PLAIN_LAYER,
    GZIP_LAYER,
    OCI_CONFIG,
    OCI_EMPTY,
    PLAIN_LAYER,
    Descriptor,
    Document,
    LayerType,
)
from pipeline.spec.base import ForeignBase

# The same bytes by Docker's names and by OCI's.
_LAYERS: dict[str, LayerType] = {
    GZIP_LAYER: GZIP_LAYER,
    PLAIN_LAYER: PLAIN_LAYER,
    DOCKER_GZIP_LAYER: GZIP_LAYER,
    DOCKER_PLAIN_LAYER: PLAIN_LAYER,
}
_CONFIGS = (OCI_CONFIG, DOCKER_CONFIG)


def pin_of(document: Document) -> BlobPin:
    """A manifest or index as a lock names it."""
    return BlobPin(digest=document.digest, size_bytes=len(document.data))


def blob_pin(blob: Descriptor) -> BlobPin:
    """A blob as a lock names it."""
    return BlobPin(digest=blob.digest, size_bytes=blob.size_bytes)


def config_of(base: ForeignBase, manifest: Document) -> Descriptor:
    """An image's config; what has none is an artifact of another kind."""
    config = manifest.config
    if config is None or config.media_type not in _CONFIGS or not config.size_bytes:
        kind = config.media_type if config else OCI_EMPTY
        raise BaseUnusable(f"{base}: is not an image: its config is a {clean(kind)}")
    return config


def layer_pins(
    base: ForeignBase, manifest: Document, config: ImageConfig, platform: str
) -> list[LayerPin]:
    """The layers with their diffIDs, if they are for this platform and of a kind that is read."""
    if config.platform != platform:
        raise BaseUnusable(f"{base}: is for {clean(config.platform)}, not for {platform}")
    diff_ids = config.rootfs.diff_ids
    if len(diff_ids) != len(manifest.layers):
        raise BaseUnusable(
            f"{base}: {len(manifest.layers)} layers, but {len(diff_ids)} in its config"
        )
    if len(diff_ids) > MOST_LAYERS:
        raise BaseUnusable(f"{base}: {len(diff_ids)} layers, at most {MOST_LAYERS} can be mounted")
    return [
        LayerPin(
            digest=layer.digest,
            diff_id=diff_id,
            size_bytes=layer.size_bytes,
            media_type=_layer_type(base, layer),
        )
        for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)
    ]


def _layer_type(base: ForeignBase, layer: Descriptor) -> LayerType:
    """Gzip and plain tar; what cannot be read cannot be checked, and is refused."""
    known = _LAYERS.get(layer.media_type)
    if known is not None and layer.size_bytes:
        return known
    what = f"{base}: the layer {layer.digest} is a {clean(layer.media_type)}"
    if "foreign" in layer.media_type or "nondistributable" in layer.media_type:
        raise BaseUnusable(f"{what}, which registries may not distribute")
    if layer.media_type.endswith("zstd"):
        raise BaseUnusable(
            f"{what}; zstd is not supported, and Docker before 23 cannot run it",
            "Copy the image with gzip layers (skopeo copy --dest-compress-format gzip …) and name"
            " the copy's digest.",
        )
    raise BaseUnusable(f"{what} of {layer.size_bytes} bytes, which is not supported")


def require_locked(pin: BasePin, index: Document | None, manifest: Document) -> None:
    """The documents name what the lock names: a lock written by hand is refused here."""
    if index is not None and pin.manifest.digest not in {d.digest for d in index.manifests}:
        raise BaseUnusable(f"{pin}: is not listed in {index.digest}")
    named = [(d.digest, d.size_bytes) for d in (manifest.config, *manifest.layers) if d]
    locked = [(d.digest, d.size_bytes) for d in (pin.config, *pin.layers)]
    if named != locked:
        raise BaseUnusable(f"{pin}: its manifest names other parts than the lock")
