"""The upstream archive of a Debian source package, through signed indexes only."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from pipeline.core.errors import IndexBroken, ResolveFailed, UnknownPackage
from pipeline.images.lock.debian import Stanza, version_key
from pipeline.images.lock.debs import MAX_RELEASE_BYTES, Get, read_index, require_suite
from pipeline.images.lock.model import ArchivePin
from pipeline.images.lock.release import DEBIAN_12_KEYRING, read_release
from pipeline.images.spec.source import DebianSourceSpec

_FIELDS = ("Package", "Version", "Directory", "Checksums-Sha256")
# Not `orig-NAME.tar`, which is a further part, nor `.asc`, its signature:
# https://manpages.debian.org/bookworm/dpkg-dev/dpkg-source.1.en.html
_UPSTREAM = re.compile(r"_[^_/]+\.orig\.tar\.(?:gz|bz2|xz|lzma)$")
# A native package has no upstream archive apart from its own.
_NATIVE = re.compile(r"_[^_/-]+(?<!\.debian)\.tar\.(?:gz|bz2|xz|lzma)$")


def find_debian_source(
    wanted: DebianSourceSpec,
    get: Get,
    keyring: Path = DEBIAN_12_KEYRING,
    *,
    now: datetime | None = None,
) -> ArchivePin:
    """The archive that a suite's signed index names for a source package.

    A signed index that expired may hide newer versions; it cannot offer other bytes for one that
    the spec names, so it will do for that.
    """
    base = f"dists/{wanted.suite}"
    inrelease = get(f"{base}/InRelease", MAX_RELEASE_BYTES)
    pinned = wanted.version is not None
    release = read_release(inrelease, keyring=keyring, now=now, may_be_old=pinned)
    require_suite(release, wanted.suite)
    name, place = f"{wanted.component}/source/Sources", f"{wanted.suite}/{wanted.component}"
    stanzas = read_index(get, base, release, name, _FIELDS)
    offered = [each for each in stanzas if each.get("Package") == wanted.package]
    if not offered:
        raise UnknownPackage(
            f"{place} has no source package {wanted.package}",
            "Packages are built from sources of other names: `apt-cache showsrc NAME` shows them.",
        )
    fitting = [x for x in offered if wanted.version in (None, x.get("Version"))]
    if not fitting:
        versions = ", ".join(sorted(x.get("Version", "") for x in offered))
        raise ResolveFailed(f"{place} has {wanted.package} {versions}, not {wanted.version}")
    return _pin(max(fitting, key=lambda x: version_key(x.get("Version", ""))))


def _pin(stanza: Stanza) -> ArchivePin:
    package, version = stanza["Package"], stanza.get("Version", "")
    rows = [line.split() for line in stanza.get("Checksums-Sha256", "").split("\n") if line.strip()]
    if any(len(row) != 3 for row in rows):
        raise IndexBroken(f"{package} {version}: its list of files cannot be read")
    archives = [row for row in rows if _UPSTREAM.search(row[2])]
    archives = archives or [row for row in rows if _NATIVE.search(row[2])]
    if len(archives) != 1:
        raise ResolveFailed(f"{package} {version}: has {len(archives)} upstream archives, not one")
    sha256, size, file = archives[0]
    try:
        return ArchivePin(
            kind="debian",
            name=package,
            version=version,
            path=f"{stanza.get('Directory', '')}/{file}",
            file=file,
            size_bytes=int(size),
            sha256=sha256,
        )
    except (ValidationError, ValueError) as error:
        raise IndexBroken(f"{package} {version}: its list of files cannot be used") from error
