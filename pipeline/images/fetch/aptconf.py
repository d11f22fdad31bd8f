"""Where this machine gets Debian packages from, read from its own apt configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.core.errors import IndexBroken, MirrorUnknown
from pipeline.images.lock.debian import read_stanzas

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

    def bases_for(self, path: str) -> tuple[str, ...]:
        """The archive that a locked path lies in: only security's pool has `updates`."""
        return self.security if path.startswith("pool/updates/") else self.main


@dataclass(frozen=True, slots=True)
class _Source:
    """One line of apt's configuration, whichever way it was written."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str


def find_mirror(root: Path = Path("/")) -> DebianMirror:
    """The Debian mirror that apt uses here, else the one that python-apt knows."""
    # on Ubuntu apt has no mirror of Debian's, but python-apt, which it comes with, names one
    for find in (_from_apt, _from_python_apt):
        mirror = find(root)
        if mirror.main:
            return mirror
    raise MirrorUnknown(
        f"no Debian mirror in {root / 'etc/apt'}",
        "Set SM120_DEBIAN_MIRROR to the base address of one, the part before /dists/.",
    )


def _from_apt(root: Path) -> DebianMirror:
    apt, main, security = root / "etc/apt", list[str](), list[str]()
    # apt's own order, and only the names that apt reads: an editor leaves debian.list.save behind
    paths = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    read = {".list": _one_line_sources, ".sources": _deb822_sources}
    for source in (s for p in paths if p.suffix in read for s in read[p.suffix](_text(p))):
        # a line without main is for firmware or drivers alone
        if "main" not in source.components or not _may_be_debian(source):
            continue
        pockets = {match["pocket"] for s in source.suites if (match := _SUITE.fullmatch(s))}
        uris = list(_addresses(source.uri, root))
        # Backports alone would not do, but every mirror with backports has the suite itself.
        if pockets - _SECURITY:
            main += uris
        if pockets & _SECURITY:
            security += uris
    return DebianMirror(_bases(main), _bases(security))


def _from_python_apt(root: Path) -> DebianMirror:
    """python-apt's template repeats fields, so it is read line by line, not as deb822."""
    bases: dict[str, list[str]] = {"{series}": [], "{series}-security": []}
    suite = ""
    for line in _text(root / "usr/share/python-apt/templates/Debian.info").splitlines():
        name, _, value = line.partition(":")
        if name == "Suite":
            suite = value.strip()
        elif name == "BaseURI" and suite in bases:
            bases[suite].append(value.strip())
    return DebianMirror(*map(_bases, bases.values()))


def _one_line_sources(text: str) -> Iterator[_Source]:
    for line in text.splitlines():
        if match := _ONE_LINE.fullmatch(line.partition("#")[0].strip()):
            suite, *components = match["rest"].split()
            key = re.search(r"signed-by=(\S+)", match["options"] or "", re.IGNORECASE)
            yield _Source(match["uri"], (suite,), tuple(components), key[1] if key else "")


def _deb822_sources(text: str) -> Iterator[_Source]:
    with suppress(IndexBroken):  # a file that apt itself could not read counts as empty
        for stanza in read_stanzas(text, _FIELDS):
            enabled = stanza.get("Enabled", "yes").lower() not in _NO
            uris, suites, components = (
                tuple(stanza.get(name, "").split()) for name in ("URIs", "Suites", "Components")
            )
            for uri in uris if enabled and "deb" in stanza.get("Types", "").split() else ():
                yield _Source(uri, suites, components, stanza.get("Signed-By", ""))


def _may_be_debian(source: _Source) -> bool:
    """Tell Debian from vendors that name their suites like Debian's.

    A wrong guess costs a failed lookup, never a wrong package: signatures decide that.
    """
    if source.signed_by:
        # a key may be a file, several files, or stand in the stanza itself
        names = re.split(r"[,\s]+", source.signed_by)
        return any(name.rpartition("/")[2].startswith("debian-archive") for name in names)
    return "debian" in source.uri.lower() or any(s.endswith("-security") for s in source.suites)


def _addresses(uri: str, root: Path) -> Iterator[str]:
    """The address itself, or those in the list that a `mirror+file:` address names."""
    if not uri.startswith("mirror+file:"):
        yield uri
        return
    path = root / urlsplit(uri.removeprefix("mirror+")).path.lstrip("/")
    for line in _text(path).splitlines():
        yield from line.partition("#")[0].split()[:1]


def _bases(uris: Iterable[str]) -> tuple[str, ...]:
    """Usable addresses without their trailing slash, each once, in order."""
    usable = (uri.rstrip("/") for uri in uris if uri.partition(":")[0].lower() in _SCHEMES)
    return tuple(dict.fromkeys(usable))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
