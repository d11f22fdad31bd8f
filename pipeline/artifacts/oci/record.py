"""What is known of a finished layer and of a finished image, as the store keeps it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field, PlainSerializer

from pipeline.artifacts.oci.document import GZIP_LAYER, Descriptor, as_descriptor, descriptor_json
from pipeline.core.model import Digest, Frozen, canonical_json


class Kind(StrEnum):
    """What an entry of a layer is."""

    DIR = "dir"
    FILE = "file"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"


class FileRow(NamedTuple):
    """Where a file of a layer lies in the blob, and what it is."""

    path: str
    kind: str  # a Kind; layers of others hold devices and pipes, too
    mode: int
    size_bytes: int
    sha256: str
    offset: int
    target: str
    owner: str
    # known of foreign layers only: ours belong to root, but for homes
    uid: int = 0
    gid: int = 0


class _Record(Frozen):
    def dump(self) -> bytes:
        """As the store keeps it: fields with their usual value are left out."""
        return canonical_json(self.model_dump(exclude_defaults=True))


class LayerRecord(_Record):
    """A finished layer: what a manifest names of it."""

    digest: Digest
    diff_id: Digest
    size_bytes: int
    unpacked_bytes: int
    media_type: str = GZIP_LAYER
    is_foreign: bool = False  # of a foreign image: its files can be listed, not read by offset


class WrittenLayer(NamedTuple):
    """A layer that was just written, with its table of contents."""

    record: LayerRecord
    rows: list[FileRow]


class TitledLayer(Frozen):
    """A layer of an image, and what a person calls it."""

    title: str
    record: LayerRecord


class ImageRecord(_Record):
    """A finished image: what it was made from, and all of its parts in the store."""

    key: Digest  # of the inputs
    code: Digest  # of the builder
    config: Digest
    # as indexes write it: the record keeps the image's line of the store's index
    descriptor: Annotated[
        Descriptor, BeforeValidator(as_descriptor), PlainSerializer(descriptor_json)
    ]
    layers: Annotated[tuple[TitledLayer, ...], Field(min_length=1)]
    base: tuple[Digest, ...] = ()  # the documents of a foreign base

    @property
    def digest(self) -> str:
        return self.descriptor.digest

    @property
    def size_bytes(self) -> int:
        return sum(x.record.size_bytes for x in self.layers)

    @property
    def unpacked_bytes(self) -> int:
        return sum(x.record.unpacked_bytes for x in self.layers)

    @property
    def digests(self) -> set[str]:
        """Every blob that the image needs."""
        layers = {x.record.digest for x in self.layers}
        return {self.digest, self.config, *layers, *self.base}
