"""A source's files: locked, unpacked without trust in the archive's names, extended and patched."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import Version

from pipeline.artifacts.store.store import Store
from pipeline.core import errors, files, log
from pipeline.core.model import canonical_json, sha256_of, stays_below
from pipeline.core.sealed import UNSEALED
from pipeline.images.assemble import patch
from pipeline.images.assemble.layer import path_fault
from pipeline.images.lock.debs import find_debian_source
from pipeline.images.lock.model import ArchivePin, SourceLock
from pipeline.images.spec.source import ArchiveSpec, SourceSpec

# Engines with all they vendor have some ten thousand files; these are far from that.
_MOST_FILES = 200_000
_MOST_BYTES = 8 << 30
# What may come between the contents of two files: headers, with names and times in them.
_MOST_HEADER_BYTES = 4 << 20
# Linux gives up after 40 links on one path; honest sources have some hundred links of ten parts.
_MOST_LINKS = 40
_LONGEST_TARGET = 4095
_MOST_STEPS = 2_000_000
_CHUNK_BYTES = 1 << 20
# These readers, unlike tarfile's own, notice a missing end.
_PACKINGS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
# How tarfile and the unpackers report damage: bz2 as an error of the system, sparse maps and pax
# headers as whatever `int` and slices raise, thousands of headers in a row as too deep a call.
_DAMAGE = (
    *(tarfile.TarError, lzma.LZMAError, zlib.error, struct.error, EOFError, OSError),
    *(ValueError, LookupError, ArithmeticError, RecursionError, MemoryError),
)


# O_EXCL: an honest archive has no name twice, and no file below a link.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a pipe in the place of a file must not make us wait.
_KNOWN_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HINTS = dict.fromkeys(
    ("before", "after", ""),
    "Redo the patch for this source; the hash printed here belongs into source.yaml.",
)
# What opening answers where a path is missing, or has a link or something else than a file on it.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)


@dataclass(frozen=True)
class Unpacked:
    """A source's files in a folder."""

    folder: Path
    tree: str
    files: int


def unpack_source(archive: Path, spec: ArchiveSpec, folder: Path, name: str) -> Unpacked:
    """Writes the files that a build needs into an empty folder, and names them by one digest."""
    folder.mkdir(exist_ok=True)
    below = spec.below
    if not below:
        tops = {_plain(member.name, name).split("/")[0] for member, _ in _members(archive, name)}
        if len(tops) != 1:
            message = f"{name}: archive: below: must be named, as it has {len(tops)} folders"
            raise errors.SpecInvalid(message)
        below = tops.pop()
    seen, links = 0, dict[str, str]()
    for member, content in _members(archive, name):
        whole = "" if member.name in (".", "./") else _plain(member.name, name)
        path = whole.removeprefix(f"{below}/")
        if path == whole or member.isdir():
            continue
        if any(path == entry or path.startswith(f"{entry}/") for entry in spec.leave_out):
            continue
        seen += 1
        if fault := _name_fault(path) or path_fault(path):
            raise errors.HostileArchive(f"{name}: the path {path[:200]!r} {fault}")
        if member.issym():
            links[path] = member.linkname
            if fault := _name_fault(member.linkname):
                raise errors.HostileArchive(f"{name}: {path} is a link to a name that {fault}")
        _write(folder, path, member, content, name)
    if not seen:
        raise errors.SpecInvalid(f"{name}: archive: has nothing below {below!r}")
    _require_links_inside(links, name)
    # one digest of all files: path, whether it may be executed, contents or target
    rows = []
    for entry in files.files_below(folder):
        place = Path(entry.path)
        relative = place.relative_to(folder).as_posix()
        if entry.is_symlink():
            rows.append([relative, "link", str(place.readlink())])
        else:
            kind = "program" if place.stat().st_mode & 0o100 else "file"
            rows.append([relative, kind, files.sha256_of_file(place)])
    return Unpacked(folder, sha256_of(canonical_json(sorted(rows))), seen)


class _Metered:
    """Reads an archive up to what its headers and the next file may have.

    tarfile reads a header of any stated size into memory, and knows no limit.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name, self.left = file, name, _MOST_HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise errors.HostileArchive(
                f"{self._name}: a header in it is larger than any of a source"
            )
        return data


def _members(archive: Path, name: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    n_files = n_bytes = 0
    too_much = f"{name}: holds more files or bytes than any source"
    with archive.open("rb") as file:
        magic = file.read(6)
    unpacker = next((x for start, x in _PACKINGS.items() if magic.startswith(start)), None)
    try:
        with unpacker(archive) if unpacker else archive.open("rb") as file:
            metered = _Metered(file, name)
            stream = cast("IO[bytes]", metered)
            with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8") as tar:
                for member in tar:
                    n_files, n_bytes = n_files + 1, n_bytes + member.size
                    # before its contents are unpacked, also of files that no build needs
                    if member.size < 0 or n_files > _MOST_FILES or n_bytes > _MOST_BYTES:
                        raise errors.HostileArchive(too_much)
                    if member.issparse():  # its map may state anything
                        raise errors.HostileArchive(
                            f"{name}: {member.name[:200]!r} is a sparse file"
                        )
                    metered.left = member.size + _MOST_HEADER_BYTES
                    yield member, tar.extractfile(member) if member.isreg() else None
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            # to the end: tarfile accepts an archive that was cut between two files
            while rest := file.read(_CHUNK_BYTES):
                n_bytes += len(rest)
                if n_bytes > _MOST_BYTES:
                    raise errors.HostileArchive(too_much)
    except _DAMAGE as error:
        raise errors.CorruptArchive(f"{name}: is not a whole tar archive ({error})") from error


def _plain(text: str, name: str) -> str:
    try:
        return stays_below(text.removeprefix("./").rstrip("/"))
    except ValueError as error:
        raise errors.HostileArchive(
            f"{name}: holds {text[:200]!r}, which leads out of it"
        ) from error


def _name_fault(name: str) -> str:
    """Why a name has no digest, or no file system takes it; tarfile passes any bytes on."""
    if "\0" in name or any("\ud800" <= c <= "\udfff" for c in name):
        return "is not UTF-8 text"
    if not name:
        return "is empty"
    return "is too long" if len(name.encode()) > _LONGEST_TARGET else ""


def _write(
    folder: Path, path: str, member: tarfile.TarInfo, content: IO[bytes] | None, name: str
) -> None:
    *parents, last = path.split("/")
    with files.os_errors_explained(folder / path):
        try:
            with files.folder_below(folder, parents, make=True) as parent:
                if member.issym():
                    return os.symlink(member.linkname, last, dir_fd=parent)
                if content is None:
                    kinds = "neither a file, a folder nor a symlink"
                    raise errors.HostileArchive(f"{name}: {path} is {kinds}")
                with os.fdopen(os.open(last, _NEW_FILE, 0o600, dir_fd=parent), "wb") as out:
                    out.writelines(_pieces(content, name))
                    os.fchmod(out.fileno(), 0o755 if member.mode & 0o100 else 0o644)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
                message = f"{name}: {path} is in it twice, or below a link or a file"
                raise errors.HostileArchive(message) from error
            raise


def _pieces(content: IO[bytes], name: str) -> Iterator[bytes]:
    """Reads a file; a failed read is the archive's fault, a failed write is not."""
    try:
        while chunk := content.read(_CHUNK_BYTES):
            yield chunk
    except _DAMAGE as error:
        raise errors.CorruptArchive(f"{name}: is not a whole tar archive ({error})") from error


def _require_links_inside(links: Mapping[str, str], name: str) -> None:
    """Follows every link, with all links on its path: it may lead anywhere in the source."""
    steps = 0
    for path, link in links.items():
        at, todo, followed = path.split("/")[:-1], [*reversed(link.split("/"))], 0
        fault = "out of the source" if link.startswith("/") else ""
        while todo and not fault:
            steps, part = steps + 1, todo.pop()
            if part == "..":
                fault = "" if at else "out of the source"
                del at[-1:]
            elif part not in ("", "."):
                target = links.get("/".join([*at, part]))
                if target is None:
                    at.append(part)
                else:  # the loop refuses an absolute one when it comes to it
                    followed += 1
                    todo += reversed(target.split("/"))
            if followed > _MOST_LINKS:
                fault = "in a circle"
            elif steps > _MOST_STEPS:
                fault = "over more links than any source has"
        if fault:
            raise errors.HostileArchive(
                f"{name}: {path} is a link to {link[:200]!r}, which leads {fault}"
            )


def add_files(spec: SourceSpec, own: Path, source: Path) -> None:
    """Puts our own files into the source as the spec says; none may replace a file of it."""
    for file in spec.files:
        *parents, last = file.to.lstrip("/").split("/")
        data = (own / file.source).read_bytes()
        try:
            with (
                files.folder_below(source, parents, make=True) as parent,
                os.fdopen(os.open(last, _NEW_FILE, dir_fd=parent), "wb") as out,
            ):
                out.write(data)
                os.fchmod(out.fileno(), int(file.mode, 8))
        except FileExistsError as error:
            message = f"{spec.name}: files: {file.to} is already in the source; patch it"
            raise errors.SpecInvalid(message) from error
        except OSError as error:
            with files.os_errors_explained(source):
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
            message = f"{spec.name}: files: {file.to} is below a link or a file of the source"
            raise errors.SpecInvalid(message) from error


def apply_patches(spec: SourceSpec, own: Path, source: Path) -> None:
    """Applies every patch exactly; a file that differs from its hashes stops the build."""
    for entry in spec.patches:
        promised = {file.path: file for file in entry.files}
        for change in patch.read_listed_patch(own, entry.file, "source.yaml"):
            if change.path not in promised:
                raise errors.PatchConflict(
                    f"{entry.file}: changes {change.path}, which is not listed",
                    "List it under `files` of the patch in source.yaml.",
                )
            want = promised[change.path]
            *parents, last = change.path.split("/")
            try:
                with (
                    files.folder_below(source, parents) as parent,
                    os.fdopen(os.open(last, _KNOWN_FILE, dir_fd=parent), "r+b") as file,
                ):
                    after = patch.apply_promised(
                        change, file.read(), want, entry.file, "source.yaml", _HINTS
                    )
                    file.seek(0)
                    file.write(after)
                    file.truncate()
            except OSError as error:
                with files.os_errors_explained(source / change.path):
                    if error.errno not in _NO_FILE:
                        raise
                message = f"{entry.file}: the source has no file {change.path}"
                raise errors.PatchConflict(message) from error


def lock_source(store: Store, spec: SourceSpec) -> SourceLock:
    """Locks a source from the index or mirror that its spec names."""
    # slow to import, and only a new lock asks
    from pipeline.core.net.http import NetClient
    from pipeline.core.net.settings import read_settings
    from pipeline.images.fetch.index import list_index_files
    from pipeline.images.fetch.inputs import make_fetcher, make_transport

    client, ask = NetClient(read_settings()), make_transport()
    if wanted := spec.archive.sdist:
        # by the hash that the index states
        project, this = wanted.project, (canonicalize_name(wanted.project), Version(wanted.version))
        indexes = client.settings.indexes
        for package in (x for index in indexes for x in list_index_files(client, index, project)):
            file, digest = package.filename, package.digests.get("sha256")
            with suppress(InvalidSdistFilename):
                if digest and parse_sdist_filename(file) == this:
                    break
        else:
            raise errors.ResolveFailed(
                f"{project} {wanted.version}: no index has its source archive"
            )
        pin = ArchivePin(
            kind="sdist",
            name=project,
            version=wanted.version,
            file=file,
            size_bytes=package.size or ask.wheel_size(project, file, digest or ""),
            sha256=digest or "",
        )
    elif debian := spec.archive.debian:
        security = debian.suite.endswith("-security")
        pin = find_debian_source(debian, ask.debian_security if security else ask.debian)
    else:
        raise errors.SpecInvalid(
            f"{spec.name}: archive: is a file of your own",
            f"`sm120 source lock {spec.name} --from FILE` locks it.",
        )
    with log.progress("fetched", pin.size_bytes) as bar:
        archive = make_fetcher(store, (), offline=False).fetch(pin, bar)
    return _sealed(store, spec, pin, archive)


def lock_file(store: Store, spec: SourceSpec, archive: Path) -> SourceLock:
    """Locks a source from a local archive, and keeps that in the store for the build."""
    if not archive.is_file():
        raise errors.SpecInvalid(f"{archive}: is not a file", "Name a tar archive, packed or not.")
    digest = files.sha256_of_file(archive).removeprefix("sha256:")
    size_bytes = archive.stat().st_size
    pin = ArchivePin(
        kind="file", name=spec.name, file=archive.name, size_bytes=size_bytes, sha256=digest
    )
    lock = _sealed(store, spec, pin, archive)
    if not store.has_input(digest, pin.size_bytes):
        files.link_or_copy(archive, store.input_path(digest))
    return lock


def _sealed(store: Store, spec: SourceSpec, pin: ArchivePin, archive: Path) -> SourceLock:
    with tempfile.TemporaryDirectory(dir=store.tmp) as scratch:
        unpacked = unpack_source(archive, spec.archive, Path(scratch) / "tree", pin.file)
    return SourceLock(
        source=spec.name,
        spec=spec.lock_digest(),
        archive=pin,
        tree=unpacked.tree,
        files=unpacked.files,
        seal=UNSEALED,
    ).sealed()
