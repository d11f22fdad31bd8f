"""What is known of a finished layer."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.model import Digest, Frozen

GZIP_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


class FileRow(NamedTuple):
    """Where a file of a layer lies in the blob, and what it is."""

    path: str
    kind: str
    mode: int
    size_bytes: int
    sha256: str
    offset: int
    target: str
    owner: str
    # known of foreign layers only: ours belong to root, but for homes
    uid: int = 0
    gid: int = 0


class LayerFacts(NamedTuple):
    """What writing a layer taught: the manifest's numbers and the table of contents."""

    digest: str
    diff_id: str
    size_bytes: int
    unpacked_bytes: int
    rows: list[FileRow]


class LayerRecord(Frozen):
    """A finished layer: what a manifest says of it."""

    digest: Digest
    diff_id: Digest
    size_bytes: int
    unpacked_bytes: int
    media_type: str = GZIP_LAYER
    is_foreign: bool = False  # of somebody else's image: its files can be listed, not sought

    def dump(self) -> dict[str, object]:
        """As records keep it: what is as usual is not said."""
        return self.model_dump(exclude_defaults=True)
