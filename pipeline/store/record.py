"""What is known of a finished layer."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.model import Digest, Frozen


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
