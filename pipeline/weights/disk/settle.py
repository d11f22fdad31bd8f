"""A checked file gets its name; in the Hub's layout also the links by which engines find it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.files import link_or_copy, os_errors_explained, write_bytes
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place


def settle(place: Place, partial: Path, pins: Sequence[FilePin]) -> None:
    """Move checked bytes to every name that they have."""
    first, *others = dict.fromkeys(place.file(pin) for pin in pins)
    with os_errors_explained(first):
        first.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, first)
        for other in others:
            other.parent.mkdir(parents=True, exist_ok=True)
            copy = partial.with_name(f"{partial.name}.copy")
            copy.unlink(missing_ok=True)
            link_or_copy(first, copy)
            os.replace(copy, other)
    for pin in pins:
        link(place, pin)


def link(place: Place, pin: FilePin) -> None:
    """In the Hub's layout, the name that leads to the bytes; a wrong one is replaced."""
    if not place.hub_cache or place.is_without_link(pin):
        return
    name, target = place.name(pin), place.link_target(pin)
    with os_errors_explained(name):
        if name.is_symlink() and str(name.readlink()) == target:
            return
        name.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=name.parent, prefix=".new-"))
        try:
            (folder / "link").symlink_to(target)
            os.replace(folder / "link", name)
        finally:
            folder.rmdir()


def name_revision(place: Place, revision: str) -> None:
    """In the Hub's layout, let the revision's name lead to the locked commit."""
    if place.hub_cache:
        write_bytes(place.root / "refs" / revision, place.lock.commit.encode())
