"""Room for a file that is to take its place: odd things in the way are set aside, not removed."""

from __future__ import annotations

import os
import threading
from itertools import count
from pathlib import Path

from pipeline.weights.disk.hashing import read_file
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place

# Files are repaired several at once: of two that look at the same linked folder, the second would
# set aside the real folder that the first has just made, with the files in it.
_ONE_AT_A_TIME = threading.Lock()


def set_aside(place: Place, path: Path) -> Path:
    """Move something out of the way, to where a person can look at it."""
    folder = place.state / "aside"
    folder.mkdir(parents=True, exist_ok=True)
    name = "--".join(path.relative_to(place.root).parts)[-200:]
    free = next(p for n in count(1) if not os.path.lexists(p := folder / f"{n}-{name}"))
    path.rename(free)
    return free


def make_way(place: Place, target: Path) -> None:
    """Real folders down to the target, and nothing but a file in its place."""
    folder = place.root
    with _ONE_AT_A_TIME:
        for part in target.parent.relative_to(place.root).parts:
            folder /= part
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                set_aside(place, folder)
            folder.mkdir(exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            set_aside(place, target)


def _has_the_same_bytes(name: Path, pin: FilePin) -> bool:
    """Setting aside a copy of a good file would only fill the disk."""
    try:
        return read_file(name, pin.new_hash()).digest == pin.want
    except OSError:
        return False


def mend_link(place: Place, pin: FilePin) -> bool:
    """Let the name lead to the blob as the Hub's own client does it; False where it did."""
    name, wanted = place.name(pin), place.link_target(pin)
    if place.is_without_link(pin):
        return False
    make_way(place, name)
    if name.is_symlink() and str(name.readlink()) == wanted:
        return False
    if name.exists() and not name.is_symlink() and not _has_the_same_bytes(name, pin):
        set_aside(place, name)
    fresh = place.partial_folder / f"{pin.want}.link"
    fresh.parent.mkdir(parents=True, exist_ok=True)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(wanted)
    os.replace(fresh, name)
    return True
