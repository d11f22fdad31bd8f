"""From wanted package names to locked .debs and source archives, through signed indexes only."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from pipeline.core.errors import IndexBroken, ResolveFailed, UnknownPackage
from pipeline.images.lock.debian import FIELDS, Stanza, read_stanzas, resolve_closure, version_key
from pipeline.images.lock.model import ArchivePin, DebPin
from pipeline.images.lock.release import DEBIAN_12_KEYRING, Release, read_release
from pipeline.images.spec.source import DebianSourceSpec

Get = Callable[[str, int], bytes]  # a path, and how many bytes its file may have at most

# Debian 12's largest Packages file has 50 MB; a small file that inflates past this is an attack.
MAX_INDEX_BYTES = 512 * 1024 * 1024
# Debian's and Ubuntu's largest have some hundred kilobytes; its signature is checked after reading.
MAX_RELEASE_BYTES = 16 * 1024 * 1024
# so that a small index, too, may have grown by more than its own size
_SLACK_BYTES = 1024 * 1024
# the smallest download first
_PACKINGS = (".xz", ".gz", "")


def resolve_debs(
    wanted: Iterable[str],
    exclude: Iterable[str],
    suites: Sequence[tuple[str, Get]],
    components: Sequence[str],
    architecture: str,
    keyring: Path = DEBIAN_12_KEYRING,
    *,
    now: datetime | None = None,
) -> list[DebPin]:
    """Lock the closure of the wanted packages.

    Each suite comes with the way to its archive, as security updates have one of their own:
    `get("dists/bookworm/InRelease", most_bytes)` returns a file below the archive's root.
    """
    indexes: list[Iterator[Stanza]] = []
    for suite, get in suites:
        inrelease = get(f"dists/{suite}/InRelease", MAX_RELEASE_BYTES)
        release = read_release(inrelease, keyring=keyring, now=now)
        require_suite(release, suite)
        for component in components:
            folder = f"{component}/binary-{architecture}"
            indexes.append(read_packages(get, f"dists/{suite}", release, folder))
    return resolve_closure(indexes, wanted, architecture, exclude)


def require_suite(release: Release, name: str) -> None:
    """Refuses the Release file of another suite, however validly signed."""
    if name not in (release.codename, release.suite):
        raise IndexBroken(
            f"asked for suite {name}, received {release.codename or release.suite or 'no name'}"
        )


def read_packages(get: Get, base: str, release: Release, folder: str) -> Iterator[Stanza]:
    """Reads the packages of one index file that a verified Release file promises.

    `base` is where the Release file lies; `folder` is the index's place below it. Both are
    empty in a flat repository, as NVIDIA's are.
    """
    return read_debian_index(
        get, base, release, f"{folder}/Packages" if folder else "Packages", FIELDS
    )


def read_debian_index(
    get: Get, base: str, release: Release, name: str, fields: Iterable[str]
) -> Iterator[Stanza]:
    """Reads the stanzas of an index file, however it is packed, with only these fields."""
    # ask only for what the signed Release file lists
    for packing in _PACKINGS:
        promised = release.files.get(f"{name}{packing}")
        if promised is not None:
            break
    else:
        raise IndexBroken(f"{base or 'the repository'} has no {name}")
    plain = f"{name}{packing}"
    hashed = f"{plain.rpartition('/')[0]}/by-hash/SHA256/{promised.sha256}".lstrip("/")
    where = f"{base}/" if base else ""
    # a mirror in the middle of an update has another index; of any size it need not be read
    most_bytes = 2 * promised.size_bytes + _SLACK_BYTES
    # by hash, the index of this very Release file stays while the mirror moves on
    packed = get(f"{where}{hashed if release.by_hash else plain}", most_bytes)
    got = hashlib.sha256(packed).hexdigest()
    if len(packed) != promised.size_bytes or got != promised.sha256:
        raise IndexBroken(
            f"{where}{plain}: the Release file promises {promised.size_bytes} bytes with "
            f"sha256 {promised.sha256}, received {len(packed)} bytes with {got}"
        )
    try:
        text = inflated(packed, packing, MAX_INDEX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise IndexBroken(f"{plain} is not UTF-8") from error
    return read_stanzas(text, fields)


def inflated(packed: bytes, packing: str, limit_bytes: int) -> bytes:
    """Inflates an index file, never beyond its limit."""
    try:
        if packing == ".xz":
            with lzma.open(io.BytesIO(packed), format=lzma.FORMAT_XZ) as xz_file:
                data = xz_file.read(limit_bytes + 1)
        elif packing == ".gz":
            with gzip.open(io.BytesIO(packed)) as gz_file:
                data = gz_file.read(limit_bytes + 1)
        else:
            data = packed
    except (lzma.LZMAError, OSError, EOFError, zlib.error) as error:
        raise IndexBroken(f"an index file cannot be decompressed: {error}") from error
    # one byte more than allowed was read above: so much, and no more, shows that it is too large
    if len(data) > limit_bytes:
        raise IndexBroken(f"an index file is larger than {limit_bytes} bytes when decompressed")
    return data


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
    """Finds the archive that a suite's signed index names for a source package.

    A signed index that expired may hide newer versions; it cannot offer other bytes for one that
    the spec names, so it will do for that.
    """
    base = f"dists/{wanted.suite}"
    inrelease = get(f"{base}/InRelease", MAX_RELEASE_BYTES)
    pinned = wanted.version is not None
    release = read_release(inrelease, keyring=keyring, now=now, may_be_old=pinned)
    require_suite(release, wanted.suite)
    name, place = f"{wanted.component}/source/Sources", f"{wanted.suite}/{wanted.component}"
    stanzas = read_debian_index(get, base, release, name, _FIELDS)
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
    stanza = max(fitting, key=lambda x: version_key(x.get("Version", "")))
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
