"""Debian's `Field: value` files: Packages, Release, control, deb822 sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.errors import IndexBroken

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
        if first == "#":
            continue
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
            field = _new_field(name, seen, names)
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
        raise IndexBroken(f"expected one stanza, found {len(stanzas)}")
    return stanzas[0]


def _new_field(name: str, seen: set[str], names: dict[str, str] | None) -> str | None:
    """The name to store a field under; None for one nobody asked for."""
    key = name.lower()
    if not key or key[0] == "-" or key.split() != [key]:
        raise IndexBroken(f"not a field name: {name[:80]!r}")
    if key in seen:
        raise IndexBroken(f"field {name} is given twice in one stanza")
    seen.add(key)
    return name if names is None else names.get(key)
