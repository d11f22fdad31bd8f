"""Give checked bytes their names; in the Hub's layout also the links that engines follow.

Sets aside what is in the way, and never removes it: it may be a user's own.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from pipeline.core.files import link_or_copy, os_errors_explained, write_bytes
from pipeline.weights.disk.hashing import hash_file
from pipeline.weights.model import FilePin
from pipeline.weights.place import LockedFolder

# Files are repaired in parallel: of two that look at the same linked folder, the second would set
# aside the real folder that the first has just made, with the files in it.
_MAKING_WAY = threading.Lock()


def install_file(place: LockedFolder, partial: Path, pins: Sequence[FilePin]) -> None:
    """Move checked bytes to every name that they have."""
    first, *others = dict.fromkeys(place.file(pin) for pin in pins)
    with os_errors_explained():
        first.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, first)
        for other in others:
            other.parent.mkdir(parents=True, exist_ok=True)
            # made aside: the other name must never lead to half a file
            copy = partial.with_name(f"{partial.name}.copy")
            copy.unlink(missing_ok=True)
            link_or_copy(first, copy)
            os.replace(copy, other)
    for pin in pins:
        link(place, pin)


def link(place: LockedFolder, pin: FilePin) -> bool:
    """In the Hub's layout, link the name to the blob; return whether that changed it."""
    if not place.hub_cache or place.is_without_link(pin):
        return False
    name = place.name(pin)
    # relative, as the Hub's own client writes it: a cache can be moved
    target = os.path.relpath(place.file(pin), name.parent)
    with os_errors_explained():
        if name.is_symlink() and str(name.readlink()) == target:
            return False
        name.parent.mkdir(parents=True, exist_ok=True)
        # made aside and moved over the old one: an engine that opens the name always finds a link
        folder = Path(tempfile.mkdtemp(dir=name.parent, prefix=".new-"))
        try:
            (folder / "link").symlink_to(target)
            os.replace(folder / "link", name)
        finally:
            folder.rmdir()
    return True


def repair_link(place: LockedFolder, pin: FilePin) -> bool:
    """As `link`, after setting aside what is in the way."""
    clear_name(place, pin)
    return link(place, pin)


def clear_name(place: LockedFolder, pin: FilePin) -> None:
    """In the Hub's layout, set aside what lies in the place of a name's link."""
    if not place.hub_cache or place.is_without_link(pin):
        return
    name = place.name(pin)
    make_way(place, name)
    if name.exists() and not name.is_symlink():
        digest = ""
        with suppress(OSError):
            digest = hash_file(name, pin.new_hash()).digest
        # setting aside a copy of a good file would only fill the disk
        if digest != pin.want:
            set_aside(place, name)


def make_way(place: LockedFolder, target: Path) -> None:
    """Make real folders down to the target, and set aside a folder in its place."""
    folder = place.root
    with _MAKING_WAY:
        for part in target.parent.relative_to(place.root).parts:
            folder /= part
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                set_aside(place, folder)
            folder.mkdir(exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            set_aside(place, target)


def set_aside(place: LockedFolder, path: Path) -> Path:
    """Move something out of the way, to where a person can look at it."""
    folder = place.aside_folder
    place.require_own_state()
    folder.mkdir(parents=True, exist_ok=True)
    whole = os.fsencode("--".join(path.relative_to(place.root).parts))
    # names have at most 255 bytes; the end of a path tells more than its beginning
    name = os.fsdecode(whole) if len(whole) <= 200 else whole[-200:].decode(errors="ignore")
    free = next(p for n in count(1) if not os.path.lexists(p := folder / f"{n}-{name}"))
    path.rename(free)
    return free


def name_revision(place: LockedFolder, revision: str) -> None:
    """In the Hub's layout, let the revision's name lead to the locked commit."""
    if place.hub_cache:
        # without it the Hub's client, offline, does not find the snapshot of `main`
        write_bytes(place.root / "refs" / revision, place.lock.commit.encode())
