"""Finding a locked file: folders and mirrors first, then the index or Debian's archive.

A source only proposes places; the bytes are judged by the lock. A pin names no place, so any
source that has the right bytes will do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from urllib.parse import quote, urlsplit

from pipeline.core.errors import DigestMismatch, IndexBroken, MirrorUnknown, SourceUnreachable
from pipeline.core.files import read_at_most
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.net.failures import NetError
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import local_folder, with_login
from pipeline.images.lock.debian import read_stanzas
from pipeline.images.lock.model import ArchivePin, DebPin, Pin, WheelPin

# Closed lists: Ubuntu's `noble main` and a vendor's `nodistro main` must not pass for Debian.
_CODENAMES = "buster|bullseye|bookworm|trixie|forky|duke|sid"
_CLASSES = "(?:oldold|old)?stable|testing|unstable"
_SUITE = re.compile(
    rf"(?:{_CODENAMES}|{_CLASSES})"
    r"(?P<pocket>-security|/updates|-updates|-backports|-proposed-updates)?"
)
# `buster/updates` was the security suite's name up to Debian 10
_SECURITY = {"-security", "/updates"}
_NO = ("no", "false", "without", "off", "disable")  # all that apt reads as "no"
# Both of apt's formats: https://manpages.debian.org/bookworm/apt/sources.list.5.en.html
_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s*)?(?P<uri>\S+)\s+(?P<rest>.+)")
_FIELDS = ("Types", "URIs", "Suites", "Components", "Signed-By", "Enabled")
# What we can fetch; apt knows more, such as cdrom: and tor+http:.
_SCHEMES = ("http", "https", "file")


@dataclass(frozen=True, slots=True)
class DebianMirror:
    """Base addresses, in order of preference, of the main and the security archive."""

    main: tuple[str, ...]
    security: tuple[str, ...]


def debian_mirror(root: Path = Path("/")) -> DebianMirror:
    """SM120_DEBIAN_MIRROR (and _SECURITY), else what apt uses here, else what python-apt knows."""
    if chosen := os.environ.get("SM120_DEBIAN_MIRROR"):
        named = os.environ.get("SM120_DEBIAN_SECURITY_MIRROR", "").split()
        return DebianMirror(main=tuple(chosen.split()), security=tuple(named))
    apt, main, security = root / "etc/apt", list[str](), list[str]()
    # apt's own order, and only the names that apt reads: an editor leaves debian.list.save behind
    paths = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    sources: list[tuple[str, list[str], list[str], str]] = []
    for path, text in ((path, _text(path)) for path in paths):
        for line in text.splitlines() if path.suffix == ".list" else ():
            if match := _ONE_LINE.fullmatch(line.partition("#")[0].strip()):
                suite, *components = match["rest"].split()
                found = re.search(r"signed-by=(\S+)", match["options"] or "", re.IGNORECASE)
                sources.append((match["uri"], [suite], components, found[1] if found else ""))
        with suppress(IndexBroken):  # a file that apt itself could not read counts as empty
            for stanza in read_stanzas(text, _FIELDS) if path.suffix == ".sources" else ():
                lists = [stanza.get(x, "").split() for x in _FIELDS[:4]]
                if "deb" in lists[0] and stanza.get("Enabled", "yes").lower() not in _NO:
                    key = stanza.get("Signed-By", "")
                    sources += [(uri, lists[2], lists[3], key) for uri in lists[1]]
    for uri, suites, components, key in sources:
        # Vendors name their suites like Debian's. A wrong guess costs a failed lookup, never a
        # wrong package: signatures decide that.
        is_debian = "debian" in uri.lower() or any(s.endswith("-security") for s in suites)
        if key:
            # a key may be a file, several files, or stand in the stanza itself
            names = [name.rpartition("/")[2] for name in re.split(r"[,\s]+", key)]
            is_debian = any(name.startswith("debian-archive") for name in names)
        # a line without main is for firmware or drivers alone
        if "main" not in components or not is_debian:
            continue
        pockets, uris = {m["pocket"] for s in suites if (m := _SUITE.fullmatch(s))}, [uri]
        if uri.startswith("mirror+file:"):
            path = root / urlsplit(uri.removeprefix("mirror+")).path.lstrip("/")
            lines = [line.partition("#")[0].split() for line in _text(path).splitlines()]
            uris = [words[0] for words in lines if words]
        # Backports alone would not do, but every mirror with backports has the suite itself.
        main += uris if pockets - _SECURITY else []
        security += uris if pockets & _SECURITY else []
    if bases := _bases(main):
        return DebianMirror(bases, _bases(security))
    # on Ubuntu apt has no mirror of Debian's, but python-apt, which it comes with, names one
    known: dict[str, list[str]] = {"{series}": [], "{series}-security": []}
    suite = ""
    # its template repeats fields, so it is read line by line, not as deb822
    for line in _text(root / "usr/share/python-apt/templates/Debian.info").splitlines():
        name, _, value = line.partition(":")
        if name == "Suite":
            suite = value.strip()
        elif name == "BaseURI" and suite in known:
            known[suite].append(value.strip())
    mirror = DebianMirror(*map(_bases, known.values()))
    if mirror.main:
        return mirror
    raise MirrorUnknown(
        f"no Debian mirror in {apt}",
        "Set SM120_DEBIAN_MIRROR to the base address of one, the part before /dists/.",
    )


def _bases(uris: Iterable[str]) -> tuple[str, ...]:
    """Usable addresses without their trailing slash, each once, in order."""
    usable = (uri.rstrip("/") for uri in uris if uri.partition(":")[0].lower() in _SCHEMES)
    return tuple(dict.fromkeys(usable))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# One package version has a handful of files.
_MOST_SNAPSHOT_BYTES = 1 << 20


# Somewhere a file may be: a path here or an address elsewhere.
Place = Path | str


class Sources:
    """All the places this machine is configured to get files from."""

    def __init__(
        self, client: NetClient, mirror_finder: Callable[[], DebianMirror] | None = None
    ) -> None:
        self._client = client
        self._find_mirror = cache(mirror_finder or debian_mirror)

    def finders(self, pin: Pin, *, offline: bool) -> Iterator[Iterator[Place]]:
        """Places of a file, nearest first; each is looked up only when those before it failed."""
        settings = self._client.settings
        folders = [f for m in settings.mirrors if (f := local_folder(m))]
        if not isinstance(pin, DebPin):
            # find-links of pip and uv are for wheels and sdists; .debs may lie in mirrors only
            folders += settings.folders
        for folder in folders:
            # as `sm120 image collect` and `pip download` write them, in a folder a project, by hash
            by_hash = (folder / pin.sha256, folder / "sha256" / pin.sha256)
            paths = (folder / pin.file, folder / pin.name / pin.file, *by_hash)
            yield (path for path in paths if path.is_file())
        if offline:
            return
        # an extra mirror holds files by name, or by sha256/<hex>
        for address in (m.rstrip("/") for m in settings.mirrors if local_folder(m) is None):
            yield iter([f"{address}/{quote(pin.file)}", f"{address}/sha256/{pin.sha256}"])
        if isinstance(pin, DebPin):
            # last: mirrors drop old versions, and this archive keeps them all
            snapshot = os.environ.get("SM120_DEBIAN_SNAPSHOT")
            archived = snapshot_places(self._client, snapshot, pin) if snapshot else ()
            yield chain(self._below_mirrors(pin.path), archived)
        elif isinstance(pin, ArchivePin) and pin.kind == "debian":
            yield self._below_mirrors(pin.path or "")
        # an index knows nothing of a user's own file
        elif isinstance(pin, WheelPin) or pin.kind == "sdist":
            yield from (self._index_places(index, pin) for index in settings.indexes)

    def _index_places(self, index: str, pin: WheelPin | ArchivePin) -> Iterator[Place]:
        from pipeline.images.fetch.index import (
            find_file,  # slow to import, and not every build asks
        )

        for package in find_file(self._client, index, pin.name, pin.file):
            # before a byte is fetched: a file that was replaced upstream is found out here
            offered = package.digests.get("sha256")
            if offered and offered != pin.sha256:
                raise DigestMismatch(
                    f"{pin.file}: locked as {pin.sha256}, the index offers {offered}"
                )
            yield with_login(package.url, index)

    def _below_mirrors(self, path: str) -> Iterator[Place]:
        mirror = self._find_mirror()
        # only the pool of the security archive has `updates`
        for base in mirror.security if path.startswith("pool/updates/") else mirror.main:
            if folder := local_folder(base):
                yield folder / path
            else:
                # Debian's versions have + and ~, which its mirrors serve unescaped
                yield f"{base.rstrip('/')}/{quote(path, safe='/+~')}"


def read_below(client: NetClient, bases: Sequence[str], path: str, most_bytes: int) -> bytes:
    """A file of Debian's archive, from the first mirror that delivers it; larger is an error."""
    failures = []
    for base in bases:
        try:
            folder = local_folder(base)
            if folder is None:
                return client.read(f"{base.rstrip('/')}/{path}", most_bytes)
            if (data := read_at_most(folder / path, most_bytes)) is not None:
                return data
            failures.append(f"{folder / path}: is larger than {most_bytes} bytes")
        except OSError as error:
            failures.append(f"{base}: {error.strerror}")
        except SourceUnreachable as error:
            failures.append(str(error))
    if not bases:
        raise MirrorUnknown(
            f"no mirror is known for {path}", "Set SM120_DEBIAN_SECURITY_MIRROR to its address."
        )
    raise SourceUnreachable("; ".join(failures))


def snapshot_places(client: NetClient, base: str, pin: DebPin) -> Iterator[Place]:
    """Debian's snapshot archive keeps every version ever published, by SHA-1."""
    version = quote(pin.version, safe="")
    url = f"{base.rstrip('/')}/mr/binary/{pin.name}/{version}/binfiles?fileinfo=1"
    try:
        reply = client.fetch(url, _MOST_SNAPSHOT_BYTES)
        files = read_json(reply.data, most_bytes=_MOST_SNAPSHOT_BYTES)["fileinfo"]
        # epochs are not part of a file's name there, so the size tells the architectures apart
        fitting = [
            sha1 for sha1, copies in files.items() if pin.size_bytes in {c["size"] for c in copies}
        ]
    except (NetError, JsonInvalid, KeyError, TypeError, AttributeError):
        # a place less; the error that is shown is that of the mirrors before it
        return
    yield from (f"{base.rstrip('/')}/file/{quote(sha1, safe='')}" for sha1 in fitting)
