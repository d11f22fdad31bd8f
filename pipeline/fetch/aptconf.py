"""Where this machine gets Debian packages from, read from its own apt configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.errors import IndexBroken, MirrorUnknown
from pipeline.lock.debian import Stanza, read_stanzas

# Closed lists: Ubuntu's `noble main` and a vendor's `nodistro main` must not pass for Debian.
_CODENAMES = "buster|bullseye|bookworm|trixie|forky|duke|sid"
_CLASSES = "(?:oldold|old)?stable|testing|unstable"
_SUITE = re.compile(
    rf"(?:{_CODENAMES}|{_CLASSES})"
    r"(?P<pocket>-security|/updates|-updates|-backports|-proposed-updates)?"
)
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
    apt = root / "etc/apt"
    # apt's own order, and only the names that apt reads: an editor leaves debian.list.save behind
    sources = list(_sources_in(apt / "sources.list", _one_line_sources))
    for path in sorted((apt / "sources.list.d").glob("*")):
        if path.suffix == ".list":
            sources += _sources_in(path, _one_line_sources)
        elif path.suffix == ".sources":
            sources += _sources_in(path, _deb822_sources)
    return _mirror(sources, root)


def _from_python_apt(root: Path) -> DebianMirror:
    """python-apt's template repeats fields, so it is read line by line, not as deb822."""
    main: list[str] = []
    security: list[str] = []
    bases = {"{series}": main, "{series}-security": security}
    suite = ""
    for line in _text(root / "usr/share/python-apt/templates/Debian.info").splitlines():
        name, _, value = line.partition(":")
        if name == "Suite":
            suite = value.strip()
        elif name == "BaseURI" and suite in bases:
            bases[suite].append(value.strip())
    return DebianMirror(_bases(main), _bases(security))


def _sources_in(path: Path, read: Callable[[str], Iterable[_Source]]) -> Iterator[_Source]:
    """Sources of one file; a file that apt itself could not read counts as empty."""
    try:
        yield from read(_text(path))
    except IndexBroken:
        return


def _one_line_sources(text: str) -> Iterator[_Source]:
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.partition("#")[0].strip())
        if match is None:
            continue
        suite, *components = match["rest"].split()
        signed_by = re.search(r"signed-by=(\S+)", match["options"] or "", re.IGNORECASE)
        yield _Source(match["uri"], (suite,), tuple(components), signed_by[1] if signed_by else "")


def _deb822_sources(text: str) -> Iterator[_Source]:
    for stanza in read_stanzas(text, _FIELDS):
        if "deb" in stanza.get("Types", "").split() and _is_enabled(stanza):
            for uri in stanza.get("URIs", "").split():
                yield _Source(
                    uri,
                    tuple(stanza.get("Suites", "").split()),
                    tuple(stanza.get("Components", "").split()),
                    stanza.get("Signed-By", ""),
                )


def _is_enabled(stanza: Stanza) -> bool:
    # All that apt reads as "no".
    return stanza.get("Enabled", "yes").lower() not in ("no", "false", "without", "off", "disable")


def _mirror(sources: Iterable[_Source], root: Path) -> DebianMirror:
    main: list[str] = []
    security: list[str] = []
    for source in sources:
        # a line without main is for firmware or drivers alone
        if "main" not in source.components or not _may_be_debian(source):
            continue
        pockets = [match["pocket"] for s in source.suites if (match := _SUITE.fullmatch(s))]
        uris = list(_addresses(source.uri, root))
        # Backports alone would not do, but every mirror with backports has the suite itself.
        if any(pocket not in ("-security", "/updates") for pocket in pockets):
            main += uris
        # `buster/updates` was the security suite's name up to Debian 10
        if any(pocket in ("-security", "/updates") for pocket in pockets):
            security += uris
    return DebianMirror(_bases(main), _bases(security))


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
        fields = line.partition("#")[0].split()
        yield from fields[:1]


def _bases(uris: Iterable[str]) -> tuple[str, ...]:
    """Usable addresses without their trailing slash, each once, in order."""
    usable = (uri.rstrip("/") for uri in uris if uri.partition(":")[0].lower() in _SCHEMES)
    return tuple(dict.fromkeys(usable))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
