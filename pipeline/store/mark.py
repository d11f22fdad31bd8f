"""A store is marked as one when it is made; in any other folder nothing is written or removed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError

from pipeline.errors import NotAStore
from pipeline.files import read_at_most
from pipeline.model import Frozen

MARK = "store.json"
FORMAT = 1
_LINE = b'{"format":%d,"kind":"sm120 store"}\n' % FORMAT
# Every store has these; the others of OWN come with what needs them.
FOLDERS = (
    *("oci", "oci/blobs", "oci/blobs/sha256"),
    *("inputs", "partial", "layers", "contents", "images", "tmp", "locks"),
)
OWN = (
    *(*FOLDERS, "gate", "gates", "published", "verified"),
    *("imports", "logs", "objects", "toolchains", "trees"),
    *("attempts", "tiny", "loaded", "smoke"),
)
_MOST_BYTES = 4096  # anything larger under this name is not a mark of ours
# A new disk has the one; the other is a mark cut short, or there is nothing more to ask.
_NOTHING = ("lost+found", MARK)


class Mark(Frozen):
    """What `store.json` holds. A store of a newer format is not touched, and may hold more."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["sm120 store"]
    format: int


def require_store(root: Path) -> None:
    """Refuse a folder that is neither a store nor a place where one may be made."""
    if not is_store(root):
        other = _first_name(root)
        # somebody else may just have made it one
        if other and not is_store(root):
            raise NotAStore(f"{root}: is not a store, and not empty: it holds {other!r}")
        return
    # `trim` and `sweep` remove files: a link would lead them out of the store
    for name in OWN:
        if (root / name).is_symlink():
            raise NotAStore(
                f"{root / name}: is a symlink; a store's own folders must not be one",
                "Move the whole store instead: SM120_STORE names its place.",
            )


def write_mark(root: Path) -> None:
    """Make a folder a store; done before anything else is put into it.

    Written in place and in one piece, always the same: two that make one store at the same time do
    not disturb each other, and a kill leaves no second file, but an empty mark at worst.
    """
    if is_store(root):
        return
    # O_NOFOLLOW: a link planted here would have us write into another file
    handle = os.open(root / MARK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.write(handle, _LINE)
        os.fsync(handle)
    finally:
        os.close(handle)


def is_store(root: Path) -> bool:
    """Whether a folder has the mark of a store; a mark that is not ours is an error."""
    mark = root / MARK
    try:
        is_plain = stat.S_ISREG(mark.lstat().st_mode)
    except OSError as error:
        # other reasons are raised: `Path.exists` hides them from Python 3.14 on
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    try:
        text = read_at_most(mark, _MOST_BYTES) if is_plain else None
        if text == b"":
            return False  # cut short while it was written
        known = Mark.model_validate_json(text or b"")
    except ValidationError:
        raise NotAStore(
            f"{mark}: is damaged, or does not belong to a store",
            f"If the folder is your store, make this its only line: {_LINE.decode().strip()}",
        ) from None
    if known.format != FORMAT:
        raise NotAStore(
            f"{mark}: the store has format {known.format}, this version supports {FORMAT}",
            "Use the newer version, or name another folder with SM120_STORE.",
        )
    return True


def _first_name(root: Path) -> str:
    """A name in a folder that should be empty."""
    if not root.is_dir() and (root.exists() or root.is_symlink()):
        raise NotAStore(f"{root}: is not a folder")
    names = sorted(p.name for p in root.iterdir()) if root.exists() else []
    return next((name for name in names if name not in _NOTHING), "")
