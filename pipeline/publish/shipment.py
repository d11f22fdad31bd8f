"""What is pushed for an image: the tested bytes of the store, and an index over platforms."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.assemble.image import Built
from pipeline.errors import StoreDamaged
from pipeline.oci.document import Descriptor, Document, index_json
from pipeline.oci.document import read_document as read
from pipeline.registry.local import LocalBlob
from pipeline.store.store import Store


@dataclass(frozen=True)
class Shipment:
    """Images by platform, the document that a tag will name, and all blobs below it."""

    name: str
    images: dict[str, Document]
    root: Document
    blobs: tuple[LocalBlob, ...]

    @property
    def size_bytes(self) -> int:
        return sum(b.size_bytes for b in self.blobs)

    @property
    def documents(self) -> list[Document]:
        """In the order they may be pushed: what is named before what names it."""
        found = {d.digest: d for d in [*self.images.values(), self.root]}
        return list(found.values())


def make_shipment(store: Store, built: list[Built], *, index: bool = False) -> Shipment:
    """Read the images as they were built; nothing is made anew but the index."""
    images = {b.platform: read(store.read_blob(b.digest)) for b in built}
    root = next(iter(images.values()))
    if index or len(images) > 1:
        root = read(_index(images))
    blobs = {d.digest: d for image in images.values() for d in image.blobs}
    local = tuple(_local(store, d) for d in blobs.values())
    return Shipment(built[0].name, images, root, local)


def _local(store: Store, blob: Descriptor) -> LocalBlob:
    path = store.blob_path(blob.digest)
    if not path.is_file() or path.stat().st_size != blob.size_bytes:
        raise StoreDamaged(f"{path}: is not the {blob.size_bytes} bytes that the manifest names")
    return LocalBlob(blob.digest, blob.size_bytes, path)


def _index(images: dict[str, Document]) -> bytes:
    """The same for the same images, whenever and wherever it is made."""
    entries = [
        image.descriptor.model_copy(update={"platform": platform})
        for platform, image in sorted(images.items())
    ]
    first, *others = [image.annotations.items() for image in images.values()]
    shared = set(first).intersection(*others)
    return index_json(entries, dict(shared))
