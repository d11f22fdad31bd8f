"""A source archive's files, unpacked out of reach of hostile names, and the one digest of them."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pipeline.errors import CorruptArchive, HostileArchive, SpecInvalid
from pipeline.files import files_below, os_errors_explained, sha256_of_file
from pipeline.model import canonical_json, sha256_of, stays_below
from pipeline.spec.source import ArchiveSpec

# Engines with all they vendor have some ten thousand files; these are far from that.
_MOST_FILES = 200_000
_MOST_BYTES = 8 << 30
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Unpacked:
    """A source's files in a folder."""

    folder: Path
    tree: str
    files: int


def unpack(archive: Path, spec: ArchiveSpec, folder: Path, name: str) -> Unpacked:
    """Write the files that a build needs into an empty folder, and name them by one digest."""
    folder.mkdir(exist_ok=True)
    below = spec.below or _only_folder(archive, name)
    seen_bytes = seen = 0
    for member, content in _members(archive, name):
        path = _path_below(member, below, name)
        if path is None or _is_left_out(path, spec.leave_out):
            continue
        if member.isdir():
            continue
        seen, seen_bytes = seen + 1, seen_bytes + member.size
        if seen > _MOST_FILES or seen_bytes > _MOST_BYTES:
            raise HostileArchive(f"{name}: holds more files or bytes than any source")
        _write(folder, path, member, content, name)
    if not seen:
        raise SpecInvalid(f"{name}: archive: has nothing below {below!r}")
    return Unpacked(folder, tree_digest(folder), seen)


def tree_digest(folder: Path) -> str:
    """One digest of all files: path, whether it may be executed, contents or target."""
    rows = []
    for entry in files_below(folder):
        path = Path(entry.path)
        relative = path.relative_to(folder).as_posix()
        if entry.is_symlink():
            rows.append([relative, "link", str(path.readlink())])
        else:
            kind = "program" if path.stat().st_mode & 0o100 else "file"
            rows.append([relative, kind, sha256_of_file(path)])
    return sha256_of(canonical_json(sorted(rows)))


def _members(archive: Path, name: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                yield member, tar.extractfile(member) if member.isreg() else None
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise CorruptArchive(f"{name}: is not a whole tar archive ({error})") from error


def _only_folder(archive: Path, name: str) -> str:
    tops = {_plain(member.name, name).split("/")[0] for member, _ in _members(archive, name)}
    if len(tops) != 1:
        raise SpecInvalid(f"{name}: archive: below: must be named, as it has {len(tops)} folders")
    return tops.pop()


def _plain(text: str, name: str) -> str:
    path = text.removeprefix("./").rstrip("/")
    try:
        return stays_below(path)
    except ValueError as error:
        raise HostileArchive(f"{name}: holds {text[:200]!r}, which leads out of it") from error


def _path_below(member: tarfile.TarInfo, below: str, name: str) -> str | None:
    if member.name in (".", "./"):
        return None
    path = _plain(member.name, name)
    return path.removeprefix(f"{below}/") if path.startswith(f"{below}/") else None


def _is_left_out(path: str, leave_out: list[str]) -> bool:
    return any(path == entry or path.startswith(f"{entry}/") for entry in leave_out)


def _write(
    folder: Path, path: str, member: tarfile.TarInfo, content: IO[bytes] | None, name: str
) -> None:
    target = folder / path
    with os_errors_explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(folder.resolve()):
            raise HostileArchive(f"{name}: {path} lies behind a link")
        if member.issym():
            _require_inside(path, member.linkname, name)
            return target.symlink_to(member.linkname)
        if content is None:
            raise HostileArchive(f"{name}: {path} is neither a file, a folder nor a symlink")
        # "x": a name that comes twice, or lies behind a link, is no honest archive
        try:
            with target.open("xb") as out:
                while chunk := content.read(_CHUNK_BYTES):
                    out.write(chunk)
        except FileExistsError as error:
            raise HostileArchive(f"{name}: {path} is there twice") from error
        target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _require_inside(path: str, link: str, name: str) -> None:
    """A link may lead anywhere in the source, and nowhere else."""
    depth = len(PurePosixPath(path).parent.parts)
    for part in PurePosixPath(link).parts:
        depth += -1 if part == ".." else 1
        if depth < 0 or link.startswith("/"):
            raise HostileArchive(f"{name}: {path} is a link to {link[:200]!r}, out of the source")
