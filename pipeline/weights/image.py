"""A locked set as a plain OCI image, for Kubernetes image volumes, without copying the set.

Every large file is a layer of its own, an uncompressed tar of one file, so that a new revision
sends only what changed; the small ones share the first layer. A tar is a header, the file and some
zeros, so an upload reads it from the files. The digest follows from the lock alone.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pipeline.artifacts.oci.document import (
    OCI_CONFIG,
    OCI_MANIFEST,
    PLAIN_LAYER,
    TITLE,
    Descriptor,
    Document,
    descriptor_json,
    index_json,
    read_document,
)
from pipeline.artifacts.oci.record import Kind
from pipeline.artifacts.oci.tar_reader import END, padding
from pipeline.artifacts.registry.upload import LocalBlob
from pipeline.core import log
from pipeline.core.errors import Interrupted, SpecInvalid, StoreDamaged, WeightsDamaged
from pipeline.core.files import on_all_cores
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.assemble.image import CREATED
from pipeline.images.assemble.layer import Entry, path_fault, tar_header, with_parents
from pipeline.weights.disk.hashing import Advance, FileUnfit, FileUnreadable, open_pin
from pipeline.weights.model import FilePin
from pipeline.weights.place import LockedFolder

# The bytes of a set do not depend on a processor, but a node pulls only an image for its own.
PLATFORMS = ("linux/amd64", "linux/arm64")
_LARGE_BYTES = 8 << 20  # smaller files share a layer
_MOST_LAYERS = 120  # container engines take 127
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class SetBlob(LocalBlob):
    """A tar of some files of a set: headers in memory, the files where they lie."""

    place: LockedFolder | None = None
    parts: tuple[bytes | FilePin, ...] = ()

    def pieces(self, start: int, length: int) -> Iterator[bytes]:
        """Yield some of its bytes; refuse to upload a file that became shorter."""
        assert self.place is not None, "its files lie somewhere"
        at = 0  # where in the tar a part begins
        for part in self.parts:
            size = len(part) if isinstance(part, bytes) else part.size_bytes
            first, last = max(start - at, 0), min(start + length - at, size)
            at += size
            if first >= last:
                continue
            if isinstance(part, bytes):
                yield part[first:last]
                continue
            try:
                handle = open_pin(self.place, part)
            except (FileUnfit, FileUnreadable) as reason:
                raise StoreDamaged(f"{part.path}: {reason}") from reason
            try:
                while first < last:
                    piece = os.pread(handle, min(_PIECE_BYTES, last - first), first)
                    if not piece:
                        raise StoreDamaged(f"{part.path}: became shorter while it was read")
                    first += len(piece)
                    yield piece
            finally:
                os.close(handle)

    def require_whole(self) -> None:
        """Hashes the bytes again when a registry reports another digest."""
        hasher = hashlib.sha256()
        for piece in self.pieces(0, self.size_bytes):
            hasher.update(piece)
        if f"sha256:{hasher.hexdigest()}" != self.digest:
            raise StoreDamaged(f"{self.part} was changed since it was read")


@dataclass(frozen=True)
class SetImage:
    """The image of a set: a manifest for each platform, an index over them, and all blobs."""

    images: dict[str, Document]
    root: Document
    blobs: tuple[LocalBlob, ...]


def set_image(place: LockedFolder) -> SetImage:
    """Read every file once: compare its hash with the lock, and compute its layer's digest."""
    large = [pin for pin in place.lock.files if pin.size_bytes >= _LARGE_BYTES]
    small = [pin for pin in place.lock.files if pin.size_bytes < _LARGE_BYTES]
    for pin in place.lock.files:
        if fault := path_fault(pin.path):
            raise SpecInvalid(
                f"{place.lock.name}: {pin.path} {fault}", "Name it under `exclude` in the spec."
            )
    # one file per layer; with more files than allowed layers, several in each
    step = -(-len(large) // _MOST_LAYERS) or 1
    groups = [small, *(large[at : at + step] for at in range(0, len(large), step))]
    stop = threading.Event()
    title = f"Reading {log.count(len(place.lock.files), 'file')}, {log.size(place.lock.size_bytes)}"
    with log.step(title), log.progress("read", place.lock.size_bytes) as bar:
        layers = on_all_cores(
            lambda group: pack(place, group, bar.advance, stop),
            [g for g in groups if g],
            stop.set,
        )
    notes = {
        TITLE: place.lock.name,
        "org.opencontainers.image.revision": place.lock.commit,
        "sm120.repository": place.lock.repository,
        "sm120.weights": place.lock.seal,
    }
    images, configs = {}, []
    for platform in PLATFORMS:
        config = canonical_json(
            {
                "architecture": platform.partition("/")[2],
                "os": "linux",
                "created": CREATED,
                "config": {"Labels": notes},
                "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
                "history": [
                    {"created": CREATED, "created_by": f"sm120: {layer.part}"} for layer in layers
                ],
            }
        )
        configs.append(LocalBlob(sha256_of(config), len(config), data=config, part="config"))
        first, *others = [
            Descriptor(media_type=OCI_CONFIG, digest=sha256_of(config), size_bytes=len(config)),
            *(
                Descriptor(
                    media_type=PLAIN_LAYER,
                    digest=layer.digest,
                    size_bytes=layer.size_bytes,
                    annotations={TITLE: layer.part},
                )
                for layer in layers
            ),
        ]
        body = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": descriptor_json(first),
            "layers": [descriptor_json(layer) for layer in others],
            "annotations": notes,
        }
        images[platform] = read_document(canonical_json(body))
    entries = [
        image.descriptor.model_copy(update={"platform": platform})
        for platform, image in images.items()
    ]
    root = read_document(index_json(entries, notes))
    return SetImage(images, root, (*layers, *configs))


def pack(
    place: LockedFolder, pins: list[FilePin], advance: Advance, stop: threading.Event
) -> SetBlob:
    """The tar of some files, with its digest."""
    by_path = {pin.path: pin for pin in pins}
    parts: list[bytes | FilePin] = []
    # owned by root and readable by all: engines run as a user without rights
    for entry in with_parents([Entry(path, Kind.FILE, 0o644) for path in by_path]):
        pin = by_path.get(entry.path)
        size = pin.size_bytes if pin else 0
        parts += [tar_header(entry, size), *([pin] if pin else []), padding(size)]
    name = PurePosixPath(pins[0].path).name
    title = name if len(pins) == 1 else f"{log.count(len(pins), 'file')} from {name} on"
    draft = SetBlob("", 0, part=title, place=place, parts=(*parts, END))
    tar, size_bytes = hashlib.sha256(), 0
    for part in draft.parts:
        length = len(part) if isinstance(part, bytes) else part.size_bytes
        own = part.new_hash() if isinstance(part, FilePin) else hashlib.sha256()
        try:
            for piece in SetBlob("", 0, place=place, parts=(part,)).pieces(0, length):
                if stop.is_set():
                    raise Interrupted("stopped")
                tar.update(piece)
                own.update(piece)
                advance(len(piece) if isinstance(part, FilePin) else 0)
        except StoreDamaged as error:
            raise WeightsDamaged(f"{place.lock.name}: {error} ({place.root})") from error
        if isinstance(part, FilePin) and own.hexdigest() != part.want:
            raise WeightsDamaged(
                f"{place.lock.name}: {part.path} is {own.hexdigest()}, locked as {part.want}"
                f" ({place.root})"
            )
        size_bytes += length
    digest = f"sha256:{tar.hexdigest()}"
    return SetBlob(digest, size_bytes, part=title, place=place, parts=draft.parts)
