"""Debian's `Field: value` files and version numbers, and the closure over its dependencies."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from pydantic import ValidationError

from pipeline.core.errors import IndexBroken, ResolveFailed, UnknownPackage
from pipeline.images.lock.model import DebPin

Stanza = dict[str, str]


def read_stanzas(
    source: str | Iterable[str], keep: Iterable[str] | None = None
) -> Iterator[Stanza]:
    """Yield stanzas one by one, with only the fields in `keep` if it is given.

    Field names match in any case. They come back as `keep` spells them, else as written.
    Continuation lines are joined with a newline, without the blank that marks them.
    """
    names = None if keep is None else {name.lower(): name for name in keep}
    stanza: Stanza = {}
    seen: set[str] = set()
    field: str | None = None
    more: list[str] = []  # its continuation lines, joined once: there may be very many
    lines = source.split("\n") if isinstance(source, str) else source
    for line in lines:
        first = line[:1]
        # comments are allowed in control files; see deb822(5)
        if first == "#":
            continue
        # a line of blanks alone ends a stanza, as an empty one does
        if first in (" ", "\t") and not line.isspace():
            if not seen:
                raise IndexBroken(f"a continuation line stands before any field: {line.strip()!r}")
            if field is not None:
                more.append(line[1:].rstrip())
            continue
        if more and field is not None:
            stanza[field] = "\n".join((stanza[field], *more))
            more = []
        name, colon, value = line.partition(":")
        if colon:
            key = name.lower()
            # Debian policy 5.1: a name has no blanks and does not begin with `-`
            if not key or key[0] == "-" or key.split() != [key]:
                raise IndexBroken(f"not a field name: {name[:80]!r}")
            if key in seen:
                raise IndexBroken(f"field {name} is given twice in one stanza")
            seen.add(key)
            field = name if names is None else names.get(key)
            if field is not None:
                stanza[field] = value.strip()
        elif line.strip():
            raise IndexBroken(f"not a field: {line.strip()[:80]!r}")
        elif seen:
            yield stanza
            stanza, seen, field = {}, set(), None
    if more and field is not None:
        stanza[field] = "\n".join((stanza[field], *more))
    if seen:
        yield stanza


def read_stanza(text: str, keep: Iterable[str] | None = None) -> Stanza:
    """The only stanza of a file that must have exactly one."""
    stanzas = list(read_stanzas(text, keep))
    if len(stanzas) != 1:
        raise IndexBroken(f"expected one stanza, got {len(stanzas)}")
    return stanzas[0]


Part = tuple[tuple[tuple[int, ...], int], ...]
VersionKey = tuple[int, Part, Part]

_RUNS = re.compile(r"([^0-9]*)([0-9]*)")
# https://www.debian.org/doc/debian-policy/ch-controlfields.html has the rules for versions
_ALLOWED = re.compile(r"[A-Za-z0-9.+~:-]+")


# each comparison of two versions asks for both keys
@lru_cache(maxsize=4096)
def version_key(version: str) -> VersionKey:
    """A key that sorts versions as `dpkg --compare-versions` does."""
    epoch, _, rest = version.partition(":") if ":" in version else ("0", "", version)
    # dpkg takes a missing revision for 0.
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "0")
    well_formed = epoch.isascii() and epoch.isdigit() and _ALLOWED.fullmatch(rest)
    if not (well_formed and upstream and revision):
        raise IndexBroken(f"not a Debian version: {version!r}")
    return int(epoch), _part_key(upstream), _part_key(revision)


def _part_key(text: str) -> Part:
    """Runs of other characters and of digits in turn, closed by an empty run.

    The closing run is what makes `1~` sort before `1`.
    """
    # tilde before the end, the end (0) before letters, letters before the rest
    return tuple(
        (
            (*(-1 if c == "~" else ord(c) if c.isalpha() else ord(c) + 256 for c in other), 0),
            int(digits or "0"),
        )
        for other, digits in _RUNS.findall(text)
    )


# The fields a closure reads; everything else in a Packages file may be dropped while parsing.
FIELDS = (
    *("Package", "Version", "Architecture", "Depends", "Pre-Depends", "Provides"),
    *("Filename", "Size", "SHA256"),
)
_COMPARE = {
    "<<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    ">=": operator.ge,
    ">>": operator.gt,
}
# `name:arch (>= version)`; https://www.debian.org/doc/debian-policy/ch-relationships.html
_RELATION = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9+.-]*)(?::(?P<qualifier>[a-z0-9-]+))?"
    r"(?:\s*\(\s*(?P<operator><<|<=|=|>=|>>)\s*(?P<version>[^\s)]+)\s*\))?"
)


@dataclass(frozen=True, slots=True)
class Relation:
    """One name in a dependency, with the version it must have."""

    name: str
    qualifier: str = ""
    operator: str = ""
    version: str = ""

    def accepts(self, version: str) -> bool:
        """Whether a package of this version satisfies the relation."""
        if not self.operator:
            return True
        return bool(_COMPARE[self.operator](version_key(version), version_key(self.version)))


Alternatives = tuple[Relation, ...]


class Catalogue:
    """The newest version of every package of one architecture, over all suites."""

    def __init__(self, indexes: Iterable[Iterable[Stanza]], architecture: str) -> None:
        self.architecture = architecture
        self.packages: dict[str, Stanza] = {}
        for stanza in chain.from_iterable(indexes):
            missing = {"Package", "Version", "Architecture"} - stanza.keys()
            if missing:
                lacking = " and no ".join(sorted(missing))
                raise IndexBroken(f"a package in the index has no {lacking}")
            if stanza["Architecture"] not in (architecture, "all"):
                continue
            known = self.packages.get(stanza["Package"])
            if known is None or version_key(known["Version"]) < version_key(stanza["Version"]):
                self.packages[stanza["Package"]] = stanza
        self._providers: dict[str, list[tuple[str, Relation]]] = {}
        for name in sorted(self.packages):
            for (provided,) in read_relations(self.packages[name].get("Provides", "")):
                self._providers.setdefault(provided.name, []).append((name, provided))

    def candidates(self, relation: Relation) -> list[str]:
        """Packages that satisfy a relation: the real one first, then providers by name."""
        # `:any` and `:native` are satisfied by the one architecture that an image has
        if relation.qualifier not in ("", "any", "native", self.architecture):
            return []
        real = self.packages.get(relation.name)
        names = [relation.name] if real and relation.accepts(real["Version"]) else []
        for name, provided in self._providers.get(relation.name, []):
            # Debian policy 7.5: a dependency with a version needs a Provides with a version
            unversioned = not relation.operator
            if unversioned or (provided.version and relation.accepts(provided.version)):
                names.append(name)
        return names

    def dependencies(self, name: str) -> list[Alternatives]:
        """What a package needs before and while it is used."""
        stanza = self.packages[name]
        groups = (stanza.get(f, "") for f in ("Pre-Depends", "Depends"))
        return [group for text in groups for group in read_relations(text)]


def pin_of(stanza: Stanza) -> DebPin:
    """A package of an index as a lock names it."""
    name = stanza["Package"]
    try:
        return DebPin(
            name=name,
            version=stanza["Version"],
            path=stanza["Filename"],
            size_bytes=int(stanza["Size"]),
            sha256=stanza["SHA256"],
        )
    except (KeyError, ValueError, ValidationError) as error:
        raise IndexBroken(f"{name}: the index does not describe its file: {error}") from error


@lru_cache(maxsize=4096)
def read_relations(text: str) -> tuple[Alternatives, ...]:
    """Parse `a (>= 1) | b, c:any` into groups of alternatives."""
    groups = []
    for group in filter(None, map(str.strip, text.split(","))):
        relations = []
        for part in map(str.strip, group.split("|")):
            match = _RELATION.fullmatch(part)
            if match is None:
                raise IndexBroken(f"not a dependency: {part[:80]!r}")
            relations.append(Relation(**{k: v or "" for k, v in match.groupdict().items()}))
        groups.append(tuple(relations))
    return tuple(groups)


def resolve_closure(
    indexes: Iterable[Iterable[Stanza]],
    wanted: Iterable[str],
    architecture: str,
    exclude: Iterable[str] = (),
) -> list[DebPin]:
    """The wanted packages and all they depend on, sorted by name.

    It does not follow Recommends, and takes Essential packages only when wanted or needed. It
    leaves out a dependency whose choice falls on an excluded name.
    """
    catalogue, excluded = Catalogue(indexes, architecture), frozenset(exclude)
    names = sorted(set(wanted))
    for name in names:
        if name in excluded:
            raise ResolveFailed(f"{name} is both wanted and excluded")
        if name not in catalogue.packages:
            raise _unknown(name, catalogue)
    chosen: set[str] = set()
    # Every dependency that leaves a choice waits until the clear ones are made, so that the result
    # does not depend on the order in which packages are visited.
    open_choices: dict[Alternatives, str] = {}
    todo = names
    while todo or open_choices:
        if not todo:
            # by name, not by when it was met: the lock must not depend on the order of an index
            group = min(open_choices, key=dependency_text)
            needed_by = open_choices.pop(group)
            options: list[str] = []
            for relation in group:
                is_left_out = relation.name in excluded
                options += [relation.name] if is_left_out else catalogue.candidates(relation)
            if not options:
                raise ResolveFailed(
                    f"{needed_by} needs {dependency_text(group)},"
                    " and no package in the index satisfies that"
                )
            # one already chosen, else the first that exists
            name = next((option for option in options if option in chosen), options[0])
            todo = [] if name in excluded else [name]
            continue
        name = todo.pop()
        if name in chosen:
            continue
        chosen.add(name)
        for group in catalogue.dependencies(name):
            first = group[0].name
            # known to be left out: no need to put it off, and it may not even be in the index
            if len(group) == 1 and first in excluded:
                continue
            if len(group) == 1 and first in catalogue.candidates(group[0]):
                todo.append(first)
            else:
                open_choices.setdefault(group, name)
    return [pin_of(catalogue.packages[name]) for name in sorted(chosen)]


def dependency_text(group: Alternatives) -> str:
    """A dependency as Debian writes it."""
    return " | ".join(
        r.name + (f" ({r.operator} {r.version})" if r.operator else "") for r in group
    )


def _unknown(name: str, catalogue: Catalogue) -> UnknownPackage:
    providers = catalogue.candidates(Relation(name))
    if providers:
        hint = f"{name} is a virtual package. Name one that provides it: {', '.join(providers)}."
    else:
        # a typing mistake is likelier than a package that is gone
        near = difflib.get_close_matches(name, catalogue.packages, n=3, cutoff=0.7)
        hint = f"Did you mean {' or '.join(near)}?" if near else "Check the name and components."
    return UnknownPackage(f"no package {name} for {catalogue.architecture}", hint)
