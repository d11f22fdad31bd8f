"""Our own files and patches, put into an unpacked source; each change held by its hashes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pipeline.assemble import patch
from pipeline.errors import PatchConflict, SpecInvalid
from pipeline.files import folder_below, os_errors_explained
from pipeline.model import sha256_of
from pipeline.spec.source import SourcePatch, SourceSpec

_HINT = "Redo the patch for this source; the hash printed here belongs into source.yaml."
# What opening says of a path that is none, or that a link or something else than a file is on.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)


def add_files(spec: SourceSpec, own: Path, source: Path) -> None:
    """Put our own files where the spec says; none may replace one of the source's."""
    for file in spec.files:
        *parents, last = file.to.lstrip("/").split("/")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        data = (own / file.source).read_bytes()
        try:
            with (
                folder_below(source, parents, make=True) as parent,
                os.fdopen(os.open(last, flags, dir_fd=parent), "wb") as out,
            ):
                out.write(data)
                os.fchmod(out.fileno(), int(file.mode, 8))
        except FileExistsError as error:
            message = f"{spec.name}: files: {file.to} is already in the source; patch it"
            raise SpecInvalid(message) from error
        except OSError as error:
            with os_errors_explained(source):
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
            message = f"{spec.name}: files: {file.to} is below a link or a file of the source"
            raise SpecInvalid(message) from error


def apply_patches(spec: SourceSpec, own: Path, source: Path) -> None:
    """Apply every patch exactly, or none of the build begins."""
    for entry in spec.patches:
        promised = {file.path: file for file in entry.files}
        for change in patch.parse(_text(own / entry.file), entry.file):
            if change.path not in promised:
                raise PatchConflict(
                    f"{entry.file}: changes {change.path}, which is not listed",
                    "List it under `files` of the patch in source.yaml.",
                )
            want = promised[change.path]
            *parents, last = change.path.split("/")
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                with (
                    folder_below(source, parents) as parent,
                    os.fdopen(os.open(last, flags, dir_fd=parent), "r+b") as file,
                ):
                    before = file.read()
                    _require(entry, change.path, "before", want.before, before)
                    after = patch.apply(change, before, entry.file)
                    _require(entry, change.path, "after", want.after, after)
                    file.seek(0)
                    file.write(after)
                    file.truncate()
            except OSError as error:
                with os_errors_explained(source / change.path):
                    if error.errno not in _NO_FILE:
                        raise
                message = f"{entry.file}: the source has no file {change.path}"
                raise PatchConflict(message) from error


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # read_text would turn every \r\n into \n
    except (OSError, UnicodeDecodeError) as error:
        raise PatchConflict(
            f"{path.name}: cannot be read ({error})",
            "`file` in source.yaml names a file of text in the source's folder.",
        ) from error


def _require(entry: SourcePatch, path: str, when: str, want: str | None, data: bytes) -> None:
    got = sha256_of(data)
    if got != want:
        raise PatchConflict(
            f"{entry.file}: {path} {when} the patch is {got}, source.yaml has {want or 'nothing'}",
            _HINT,
        )
