"""Locks a source: looks up its archive and unpacks it once, for the digest of its files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import Version

from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import ResolveFailed, SpecInvalid
from pipeline.core.files import link_or_copy, sha256_of_file
from pipeline.images.lock.deb_source import find_debian_source
from pipeline.images.lock.debs import Get
from pipeline.images.lock.model import ArchivePin
from pipeline.images.lock.source import SourceLock, sealed_source
from pipeline.images.source.archive import unpack
from pipeline.images.spec.source import SdistSpec, SourceSpec

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

    from pipeline.images.fetch.inputs import Fetcher

ListFiles = Callable[[str], "list[DistributionPackage]"]
SizeOf = Callable[[str, str, str], int]


@dataclass(frozen=True)
class Outside:
    """Indexes and mirrors, as this machine's configuration names them."""

    list_files: ListFiles
    size_of: SizeOf
    debian: Get
    debian_security: Get
    fetcher: Fetcher


def lock_source(store: Store, spec: SourceSpec, outside: Outside) -> SourceLock:
    """Locks a source from the index or mirror that its spec names."""
    if sdist := spec.archive.sdist:
        pin = _find_sdist(sdist, outside)
    elif debian := spec.archive.debian:
        security = debian.suite.endswith("-security")
        pin = find_debian_source(debian, outside.debian_security if security else outside.debian)
    else:
        raise SpecInvalid(
            f"{spec.name}: archive: is a file of your own",
            f"`sm120 source lock {spec.name} --from FILE` locks it.",
        )
    with log.progress("fetched", pin.size_bytes) as bar:
        archive = outside.fetcher.fetch(pin, bar)
    return _sealed(store, spec, pin, archive)


def lock_file(store: Store, spec: SourceSpec, archive: Path) -> SourceLock:
    """Locks a source from a local archive, and keeps that in the store for the build."""
    if not archive.is_file():
        raise SpecInvalid(f"{archive}: is not a file", "Name a tar archive, packed or not.")
    digest, size_bytes = sha256_of_file(archive).removeprefix("sha256:"), archive.stat().st_size
    pin = ArchivePin(
        kind="file", name=spec.name, file=archive.name, size_bytes=size_bytes, sha256=digest
    )
    lock = _sealed(store, spec, pin, archive)
    if not store.has_input(digest, pin.size_bytes):
        link_or_copy(archive, store.input_path(digest))
    return lock


def _find_sdist(wanted: SdistSpec, outside: Outside) -> ArchivePin:
    """Finds the source archive of a version, by the hash that the index states."""
    project, this = wanted.project, (canonicalize_name(wanted.project), Version(wanted.version))
    for package in outside.list_files(project):
        file, digest = package.filename, package.digests.get("sha256")
        with suppress(InvalidSdistFilename):
            if digest and parse_sdist_filename(file) == this:
                return ArchivePin(
                    kind="sdist",
                    name=project,
                    version=wanted.version,
                    file=file,
                    size_bytes=package.size or outside.size_of(project, file, digest),
                    sha256=digest,
                )
    raise ResolveFailed(f"{wanted.project} {wanted.version}: no index has its source archive")


def _sealed(store: Store, spec: SourceSpec, pin: ArchivePin, archive: Path) -> SourceLock:
    with tempfile.TemporaryDirectory(dir=store.tmp) as scratch:
        unpacked = unpack(archive, spec.archive, Path(scratch) / "tree", pin.file)
    return sealed_source(spec.name, spec.lock_digest(), pin, unpacked.tree, unpacked.files)
