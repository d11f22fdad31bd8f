"""Our own files and patches, put into an unpacked source; each change held by its hashes."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.assemble import patch
from pipeline.errors import PatchConflict, SpecInvalid
from pipeline.model import sha256_of
from pipeline.spec.source import SourcePatch, SourceSpec

_HINT = "Redo the patch for this source; the hash printed here belongs into source.yaml."


def add_files(spec: SourceSpec, own: Path, source: Path) -> None:
    """Put our own files where the spec says; none may replace one of the source's."""
    for file in spec.files:
        target = source / file.to.lstrip("/")
        if target.exists():
            raise SpecInvalid(f"{spec.name}: files: {file.to} is already in the source; patch it")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own / file.source, target)
        target.chmod(int(file.mode, 8))


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
            target = source / change.path
            if not target.is_file() or target.is_symlink():
                raise PatchConflict(f"{entry.file}: the source has no file {change.path}")
            want, before = promised[change.path], target.read_bytes()
            _require(entry, change.path, "before", want.before, before)
            after = patch.apply(change, before, entry.file)
            _require(entry, change.path, "after", want.after, after)
            target.write_bytes(after)


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
