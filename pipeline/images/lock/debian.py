"""Debian's text formats: `Field: value` files (Packages, Release, control), and version numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from pipeline.core.errors import IndexBroken

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
    return tuple(
        ((*map(_character_order, other), 0), int(digits or "0"))
        for other, digits in _RUNS.findall(text)
    )


def _character_order(character: str) -> int:
    """Tilde before the end, the end (0) before letters, letters before the rest."""
    if character == "~":
        return -1
    return ord(character) if character.isalpha() else ord(character) + 256
