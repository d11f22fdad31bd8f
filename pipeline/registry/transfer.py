"""A blob of ours on its way to a registry, and the progress of one transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreDamaged
from pipeline.log import Bar

_PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class LocalBlob:
    """Bytes that we have, as a file or in memory."""

    digest: str
    size_bytes: int
    path: Path | None = None
    data: bytes = b""

    def pieces(self, start: int, length: int) -> Iterator[bytes]:
        """Some of the bytes; a file that changed under us is an error, not an upload."""
        if self.path is None:
            yield self.data[start : start + length]
            return
        with self.path.open("rb") as handle:
            handle.seek(start)
            while length > 0:
                piece = handle.read(min(_PIECE_BYTES, length))
                if not piece:
                    raise StoreDamaged(f"{self.path}: is shorter than {self.size_bytes} bytes")
                length -= len(piece)
                yield piece

    def require_whole(self) -> None:
        """Hash the bytes again when a registry reports another digest."""
        sha = hashlib.sha256()
        for piece in self.pieces(0, self.size_bytes):
            sha.update(piece)
        if f"sha256:{sha.hexdigest()}" != self.digest:
            raise StoreDamaged(f"{self.path}: does not match its digest")


class Gauge:
    """The progress of one blob in a bar that several blobs share."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._at = bar, 0

    def at(self, n_bytes: int) -> None:
        """Also backwards, when bytes must be sent again."""
        self._bar.advance(n_bytes - self._at)
        self._at = n_bytes

    def advance(self, n_bytes: int) -> None:
        """Further by so many bytes."""
        self.at(self._at + n_bytes)
