"""A source archive's files, unpacked out of reach of hostile names, and the one digest of them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from pipeline.errors import CorruptArchive, HostileArchive, SpecInvalid
from pipeline.files import files_below, os_errors_explained, sha256_of_file
from pipeline.model import canonical_json, sha256_of, stays_below
from pipeline.spec.source import ArchiveSpec

# Engines with all they vendor have some ten thousand files; these are far from that.
_MOST_FILES = 200_000
_MOST_BYTES = 8 << 30
_CHUNK_BYTES = 1 << 20
_PACKINGS: dict[bytes, Callable[[Path], IO[bytes]]] = {
    b"\x1f\x8b": lambda path: cast("IO[bytes]", gzip.open(path)),  # noqa: SIM115
    b"BZh": lambda path: cast("IO[bytes]", bz2.open(path)),  # noqa: SIM115
    b"\xfd7zXZ\0": lambda path: cast("IO[bytes]", lzma.open(path)),  # noqa: SIM115
}


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
    seen = 0
    for member, content in _members(archive, name):
        path = _path_below(member, below, name)
        if path is None or _is_left_out(path, spec.leave_out):
            continue
        if member.isdir():
            continue
        seen += 1
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
    n_files = n_bytes = 0
    try:
        with _inflated(archive) as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                n_files, n_bytes = n_files + 1, n_bytes + member.size
                # before its contents are unpacked, and of those too that nobody wants
                if n_files > _MOST_FILES or n_bytes > _MOST_BYTES:
                    raise HostileArchive(f"{name}: holds more files or bytes than any source")
                yield member, tar.extractfile(member) if member.isreg() else None
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            # to the end: tarfile is content with an archive that was cut between two files
            while rest := file.read(_CHUNK_BYTES):
                n_bytes += len(rest)
                if n_bytes > _MOST_BYTES:
                    raise HostileArchive(f"{name}: holds more files or bytes than any source")
    # bz2 speaks of damage as an error of the system
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise CorruptArchive(f"{name}: is not a whole tar archive ({error})") from error


def _inflated(archive: Path) -> IO[bytes]:
    """The archive's bytes, unpacked; these readers, unlike tarfile's own, notice a missing end."""
    with archive.open("rb") as file:
        magic = file.read(6)
    for start, opener in _PACKINGS.items():
        if magic.startswith(start):
            return opener(archive)
    return archive.open("rb")


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
        _require_no_way_out(folder, target.parent, f"{name}: {path}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                _require_inside(path, member.linkname, name)
                return target.symlink_to(member.linkname)
            if content is None:
                raise HostileArchive(f"{name}: {path} is neither a file, a folder nor a symlink")
            # "x": a name that comes twice, or lies behind a link, is no honest archive
            with target.open("xb") as out:
                while chunk := content.read(_CHUNK_BYTES):
                    out.write(chunk)
        except (FileExistsError, NotADirectoryError) as error:
            raise HostileArchive(f"{name}: {path} is there twice") from error
        target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _require_no_way_out(folder: Path, parent: Path, what: str) -> None:
    """Look before a folder is made: a link to a link may lead further than each of them says."""
    there = parent
    while not there.is_symlink() and not there.exists():
        there = there.parent
    if not there.resolve().is_relative_to(folder.resolve()):
        raise HostileArchive(f"{what} lies behind a link")


def _require_inside(path: str, link: str, name: str) -> None:
    """A link may lead anywhere in the source, and nowhere else."""
    depth = len(PurePosixPath(path).parent.parts)
    for part in PurePosixPath(link).parts:
        depth += -1 if part == ".." else 1
        if depth < 0 or link.startswith("/"):
            raise HostileArchive(f"{name}: {path} is a link to {link[:200]!r}, out of the source")
