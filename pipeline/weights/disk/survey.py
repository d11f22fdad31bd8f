"""A folder's files by size and kind, without reading a byte: missing, short, odd, or extra."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.core.model import Frozen
from pipeline.weights.disk.hashing import Identity, identity_of
from pipeline.weights.model import FilePin
from pipeline.weights.place import STATE, LockedFolder

Kind = Literal[
    "missing",
    "short",
    "long",
    "changed",
    "unreadable",
    "moved",
    "not a file",
    "link",
    "name",
    "extra",
]
# An engine imports these wherever a config names them ...
_CODE = (".py", ".pyc", ".so")
# ... and takes these from the folders it loads from, by pattern or by well-known name.
_LOADED = (
    *(".safetensors", ".gguf", ".bin", ".pt", ".pth"),
    *(".json", ".jinja", ".model", ".tiktoken"),
)
# What the Hub's own client and git keep in a folder; no engine looks there.
_OTHERS_OWN = (STATE, ".cache/huggingface", ".git")
_NAMED = 3
_ODD = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def shown_name(text: str) -> str:
    """A name that is safe for terminals and documents: odd characters are escaped."""
    # file names on a disk are anybody's: escape codes in one could rewrite the user's screen
    if text.isprintable() and unicodedata.normalize("NFC", text) == text:
        return text
    return text.encode("unicode_escape").decode()


def some(paths: list[str]) -> str:
    """The first few of them, for a message."""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{', '.join(shown_name(path) for path in paths[:_NAMED])}{more}"


Shown = Annotated[str, AfterValidator(shown_name)]


class FileFinding(Frozen):
    """One difference from the lock. Not all of them are damage."""

    path: Shown
    kind: Kind
    detail: Shown = ""
    damage: bool = True
    name: str = Field(default="", exclude=True)  # of what no lock names, as the disk has it


@dataclass(frozen=True)
class Present:
    """A file that has the right size; nobody has looked at its bytes yet."""

    pin: FilePin
    path: Path
    identity: Identity


def survey(
    place: LockedFolder, pins: Collection[FilePin]
) -> tuple[list[Present], list[FileFinding]]:
    """Judge each file by its size and kind alone, without reading it."""
    # real paths: a link on the way must not lead the reader to files outside of the folder
    root, folder = os.path.realpath(place.root), cache(os.path.realpath)
    present, findings = [], []
    for pin in pins:
        path = place.file(pin)
        real = f"{folder(path.parent)}/{path.name}"
        if path.is_symlink():
            real = os.path.realpath(path)
        kind: Kind | None = None
        detail, status = "", None
        try:
            if Path(real).is_relative_to(root):
                status = os.lstat(real)
            else:
                kind, detail = "link", f"leads out of the folder, to {real}"
        except (FileNotFoundError, NotADirectoryError):
            kind, detail = "missing", "the link is broken" if path.is_symlink() else ""
        except OSError as error:
            kind, detail = "unreadable", error.strerror or str(error)
        # opening a pipe would wait for a writer, and reading a device may have effects
        if status and not stat.S_ISREG(status.st_mode):
            kind, detail = "not a file", _ODD.get(stat.S_IFMT(status.st_mode), "a link or device")
        elif status and status.st_size != pin.size_bytes:
            kind = "short" if status.st_size < pin.size_bytes else "long"
            detail = f"{status.st_size} bytes of {pin.size_bytes}"
        elif status:
            present.append(Present(pin, Path(real), identity_of(status)))
        if kind:
            findings.append(FileFinding(path=pin.path, kind=kind, detail=detail))
        if not place.hub_cache or place.is_without_link(pin):
            continue
        # an engine that opens the name must get the blob
        name, astray = place.name(pin), ""
        try:
            if not stat.S_ISLNK(os.lstat(name).st_mode):
                astray = "its name is not a link to its blob"
            elif (target := os.path.realpath(name)) != real:
                astray = f"its name leads to {target} instead"
        except OSError as error:
            astray = f"its name is missing ({error.strerror})"
        if astray:
            findings.append(FileFinding(path=pin.path, kind="name", detail=astray))
    return present, findings


def _plain(path: Path) -> os.stat_result | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def right_size(path: Path, pin: FilePin) -> Identity | None:
    """The identity of a plain file of the locked size; none for anything else, a link too."""
    status = _plain(path)
    return identity_of(status) if status and status.st_size == pin.size_bytes else None


def plain_size(path: Path) -> int | None:
    """The size of a plain file; none for anything else, a link too."""
    status = _plain(path)
    return status.st_size if status else None


def extras(place: LockedFolder, neighbours: Iterable[LockedFolder] = ()) -> list[FileFinding]:
    """Files that no lock names. Those that an engine would run or load are damage.

    Sets that share a snapshot know each other's files.

    An extra shard, config or module changes what is loaded just as a changed one does: engines
    take `*.safetensors` by pattern, configs and templates by well-known names, and code by what a
    config names. A README, a picture or a log beside the weights changes nothing.
    """
    shared = [p for p in (place, *neighbours) if p.snapshot == place.snapshot]
    known = {pin.path for p in shared for pin in p.lock.files}
    folders = {"", *(path.rpartition("/")[0] for path in known)}
    findings = []
    for path in walk_folder(place.snapshot, _OTHERS_OWN):
        if path in known:
            continue
        # it may hold anything, so the set cannot be called whole
        if path.endswith("/"):
            detail = "a folder that cannot be listed"
            findings.append(FileFinding(path=path, kind="unreadable", detail=detail))
            continue
        # disks that ignore letter case would load MODEL.PY as well
        suffix = Path(path).suffix.lower()
        loads = suffix in _LOADED and path.rpartition("/")[0] in folders
        damage = suffix in _CODE or loads
        detail = "no lock names it, and an engine may load it" if damage else "no lock names it"
        findings.append(
            FileFinding(path=path, kind="extra", detail=detail, damage=damage, name=path)
        )
    return findings


def walk_folder(root: Path, skip: Collection[str] = ()) -> Iterator[str]:
    """List every file, link and oddity below a folder; follow no link.

    A folder that cannot be listed ends with a slash.
    """
    folders = [""]  # not by recursion: folders can be deeper than Python's stack
    while folders:
        below = folders.pop()
        try:
            with os.scandir(root / below) as entries:
                inside = list(entries)
        except FileNotFoundError:
            continue
        except OSError:
            yield below or "/"
            continue
        for entry in inside:
            path = f"{below}{entry.name}"
            if path in skip:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{path}/")
            else:
                yield path
