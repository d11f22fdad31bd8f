"""Which .debs a list of wanted packages stands for: the closure over their dependencies."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from pydantic import ValidationError

from pipeline.core.errors import IndexBroken, ResolveFailed, UnknownPackage
from pipeline.images.lock.debian import Stanza, version_key
from pipeline.images.lock.model import DebPin

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

    Recommends are not followed and Essential packages come only when wanted or needed. A
    dependency whose choice falls on an excluded name is left out.
    """
    catalogue = Catalogue(indexes, architecture)
    closure = _Closure(catalogue, frozenset(exclude))
    names = sorted(set(wanted))
    for name in names:
        if name in closure.exclude:
            raise ResolveFailed(f"{name} is both wanted and excluded")
        if name not in catalogue.packages:
            raise _unknown(name, catalogue)
    closure.follow(names)
    while closure.open_choices:
        # by name, not by when it was met: the lock must not depend on the order of an index
        group = min(closure.open_choices, key=shown)
        choice = closure.choose(group, closure.open_choices.pop(group))
        if choice is not None:
            closure.follow([choice])
    return [pin_of(catalogue.packages[name]) for name in sorted(closure.chosen)]


@dataclass
class _Closure:
    """Choices made so far, and those put off until the clear ones are made.

    Putting off every dependency that leaves a choice makes the result independent of the
    order in which packages are visited.
    """

    catalogue: Catalogue
    exclude: frozenset[str]
    chosen: set[str] = field(default_factory=set)
    open_choices: dict[Alternatives, str] = field(default_factory=dict)

    def follow(self, names: Iterable[str]) -> None:
        """Add packages and everything they need without a choice."""
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in self.chosen:
                continue
            self.chosen.add(name)
            for group in self.catalogue.dependencies(name):
                first = group[0].name
                # known to be left out: no need to put it off, and it may not even be in the index
                if len(group) == 1 and first in self.exclude:
                    continue
                if len(group) == 1 and first in self.catalogue.candidates(group[0]):
                    todo.append(first)
                else:
                    self.open_choices.setdefault(group, name)

    def choose(self, group: Alternatives, needed_by: str) -> str | None:
        """One already chosen, else the first that exists; None where that is excluded."""
        options: list[str] = []
        for relation in group:
            is_left_out = relation.name in self.exclude
            options += [relation.name] if is_left_out else self.catalogue.candidates(relation)
        if not options:
            raise ResolveFailed(
                f"{needed_by} needs {shown(group)}, and no package in the index satisfies that"
            )
        name = next((option for option in options if option in self.chosen), options[0])
        return None if name in self.exclude else name


def shown(group: Alternatives) -> str:
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
