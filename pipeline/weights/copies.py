"""Where right bytes may come from when some are wrong here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import SourceUnreachable
from pipeline.weights.model import FilePin


class Source(Protocol):
    """Another copy of a set. Nothing of it is believed before the hash is right."""

    def read(self, pin: FilePin, start: int, stop: int) -> Iterator[bytes]:
        """Exactly the bytes from start up to stop, in pieces; SourceUnreachable where it cannot."""
        ...


@dataclass(frozen=True)
class FolderSource:
    """A disk or a mounted neighbour that has the set, in either layout."""

    folder: Path

    def read(self, pin: FilePin, start: int, stop: int) -> Iterator[bytes]:
        """From the file of that name, or the blob of that hash."""
        path = next((p for p in self._places(pin) if p.is_file()), None)
        if path is None:
            raise SourceUnreachable(f"{self.folder}: has no {pin.path}")
        try:
            with path.open("rb") as handle:
                handle.seek(start)
                while start < stop and (data := handle.read(min(stop - start, 1 << 20))):
                    start += len(data)
                    yield data
        except OSError as error:
            raise SourceUnreachable(f"{path}: {error.strerror}") from error

    def _places(self, pin: FilePin) -> Iterator[Path]:
        yield self.folder / pin.path
        yield self.folder / "blobs" / pin.want
        yield from self.folder.glob(f"models--*/blobs/{pin.want}")
