"""Where a locked set lies on disk: a plain folder, or the Hub's own cache layout.

Beside the files stands `.sm120/` with a copy of the lock, so that a folder can be verified on a
machine that has neither network nor checkout, the partial files of a fetch, and the receipt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import WeightsUnknown
from pipeline.weights.model import FilePin, WeightsLock, read_lock, write_lock

STATE = ".sm120"


@dataclass(frozen=True)
class Place:
    """A folder that holds, or is going to hold, one locked set."""

    root: Path  # of the files, or in the Hub's layout of the repository's cache
    lock: WeightsLock
    hub_cache: bool = False

    @property
    def state(self) -> Path:
        """What this tool keeps beside the files; one cache may hold several sets."""
        return self.root / STATE / self.lock.name if self.hub_cache else self.root / STATE

    @property
    def lock_file(self) -> Path:
        return self.state / "lock.yaml"

    @property
    def receipt_file(self) -> Path:
        return self.state / "receipt.json"

    @property
    def partial_folder(self) -> Path:
        return self.state / "partial"

    @property
    def snapshot(self) -> Path:
        """Where engines find the files by their names."""
        return self.root / "snapshots" / self.lock.commit if self.hub_cache else self.root

    def file(self, pin: FilePin) -> Path:
        """Where a file's bytes lie."""
        return self.root / "blobs" / pin.want if self.hub_cache else self.root / pin.path

    def name(self, pin: FilePin) -> Path:
        """What an engine opens: the file itself, or a link to its blob."""
        return self.snapshot / pin.path

    def link_target(self, pin: FilePin) -> str:
        """What the Hub's own client writes into that link."""
        return "../" * (2 + pin.path.count("/")) + f"blobs/{pin.want}"

    def keep_lock(self) -> None:
        """Leave the lock beside the files."""
        write_lock(self.lock_file, self.lock)


def new_place(folder: Path, lock: WeightsLock, *, hub_cache: bool) -> Place:
    """The place for a set below a folder; for the Hub's layout that is its cache folder."""
    if not hub_cache:
        return Place(folder, lock)
    return Place(folder / f"models--{lock.repository.replace('/', '--')}", lock, hub_cache=True)


def find_places(folder: Path) -> list[Place]:
    """Every locked set in a folder: the one it is, or those of a Hub cache."""
    found = list(_found(folder))
    if not found:
        raise WeightsUnknown(
            f"{folder}: holds no locked weights ({STATE}/lock.yaml is not there)",
            "Name the folder that `sm120 weights fetch --to` made, or give --lock.",
        )
    return found


def _found(folder: Path) -> Iterator[Place]:
    if (folder / STATE / "lock.yaml").is_file():
        yield Place(folder, read_lock(folder / STATE / "lock.yaml"))
    for root in (folder, *sorted(folder.glob("models--*"))):
        for path in sorted((root / STATE).glob("*/lock.yaml")):
            yield Place(root, read_lock(path), hub_cache=True)
