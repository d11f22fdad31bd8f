"""`WWW-Authenticate`: what a registry wants to see before it answers."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)(?:\s+|$)")
_PARAMETER = re.compile(r'\s*([A-Za-z][\w-]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))\s*(?:,|$)')
_LONGEST = 4096


@dataclass(frozen=True)
class Challenge:
    """One way in: its scheme in small letters, and its parameters."""

    scheme: str
    parameters: dict[str, str]

    def get(self, name: str) -> str:
        return self.parameters.get(name, "")


def read_challenges(headers: list[str]) -> list[Challenge]:
    """All challenges of an answer; what cannot be read is passed over."""
    return [found for header in headers for found in _read(header[:_LONGEST])]


def _read(header: str) -> list[Challenge]:
    found: list[Challenge] = []
    at = 0
    while at < len(header):
        parameter = _PARAMETER.match(header, at)
        if parameter and found:
            name, quoted, plain = parameter.groups()
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            found[-1].parameters.setdefault(name.lower(), value)
            at = parameter.end()
            continue
        scheme = _SCHEME.match(header, at)
        if not scheme:
            break
        found.append(Challenge(scheme[1].lower(), {}))
        at = scheme.end()
    return found
