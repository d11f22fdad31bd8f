"""Debian version numbers in dpkg's order."""

from __future__ import annotations

import re
from functools import lru_cache

from pipeline.errors import IndexBroken

Part = tuple[tuple[tuple[int, ...], int], ...]
VersionKey = tuple[int, Part, Part]

_RUNS = re.compile(r"([^0-9]*)([0-9]*)")
_ALLOWED = re.compile(r"[A-Za-z0-9.+~:-]+")


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
    return tuple((_run_key(other), int(digits or "0")) for other, digits in _RUNS.findall(text))


def _run_key(run: str) -> tuple[int, ...]:
    """Tilde before the end, the end before letters, letters before the rest."""
    return (*(_character_order(c) for c in run), 0)


def _character_order(character: str) -> int:
    if character == "~":
        return -1
    return ord(character) if character.isalpha() else ord(character) + 256
