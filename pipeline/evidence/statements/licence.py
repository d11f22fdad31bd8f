"""Which licence a package declares: an SPDX expression where that is certain, else why not.

https://packaging.python.org/en/latest/specifications/core-metadata/ and
https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.metadata import parse_email

from pipeline.artifacts.attest.strict import plain

# some packages put the whole licence text into the field
_LONGEST_NAME = 120
# of names in a Debian copyright file, which may have dozens
_LONGEST_LIST = 2000
# Spellings that can mean one licence only.
_SPELLINGS = {
    spelling: licence
    for licence, spellings in {
        "Apache-2.0": "apache 2;apache 2.0;apache 2.0 license;apache license 2.0;"
        "apache license version 2.0;apache license, version 2.0;apache software license 2.0",
        "MIT": "mit license;the mit license",
        "BSD-3-Clause": "3-clause bsd;3-clause bsd license;bsd 3-clause;bsd 3-clause license;bsd-3",
        "BSD-2-Clause": "bsd 2-clause",
        "MPL-2.0": "mozilla public license 2.0 (mpl 2.0);mpl 2.0",
        "PSF-2.0": "psf license",
    }.items()
    for spelling in spellings.split(";")
}
_CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "Boost Software License 1.0 (BSL-1.0)": "BSL-1.0",
    "GNU General Public License v2 (GPLv2)": "GPL-2.0-only",
    "GNU General Public License v2 or later (GPLv2+)": "GPL-2.0-or-later",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0-only",
    "GNU General Public License v3 or later (GPLv3+)": "GPL-3.0-or-later",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.0-or-later",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "GNU Lesser General Public License v3 or later (LGPLv3+)": "LGPL-3.0-or-later",
}
# Debian's short names for what SPDX spells otherwise.
_DEBIAN = {"expat": "MIT", "bsd-3-clause": "BSD-3-Clause", "bsd-2-clause": "BSD-2-Clause"}
_GNU = re.compile(r"^(A?GPL|LGPL|GFDL)-(\d)(?:\.(\d))?(?:\.0)?(\+?)$")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LICENSE_LINE = re.compile(r"^License:[ \t]*(\S.*)$", re.M)


@dataclass(frozen=True)
class Licence:
    """A package's declared licence: an SPDX expression, or a name, or neither and why."""

    expression: str | None = None
    name: str | None = None
    reason: str = ""  # where it was read, or why it is not known


def wheel_licence(metadata: bytes) -> Licence:
    """Reads a wheel's METADATA: the expression, else the free text, else the classifiers."""
    # without the description, which is long and says nothing here
    head = _BLANK_LINE.split(metadata, maxsplit=1)[0]
    # it skips lines that it cannot parse: metadata of old wheels is often not quite valid
    fields, _ = parse_email(head)
    if declared := fields.get("license_expression"):
        read = "METADATA License-Expression"
        if expression := _expression(declared):
            return Licence(expression, reason=read)
        return Licence(name=_short(declared), reason=f"{read}, not SPDX's words")
    text = (fields.get("license") or "").strip()
    if expression := _expression(text) or _SPELLINGS.get(text.lower()):
        return Licence(expression, reason="METADATA License")
    # the field may hold a whole licence text, known by the line it begins with
    first, _, rest = text.partition("\n")
    title = _SPELLINGS.get(first.strip().lower()) if rest else None
    if re.match(r"Apache License\s+Version 2\.0\b", text):
        title = "Apache-2.0"
    if title:
        return Licence(title, reason="METADATA License, the title of its text")
    listed = [c for c in fields.get("classifiers", ()) if c.startswith("License :: ")]
    named = [c.rpartition(" :: ")[2] for c in listed if c != "License :: OSI Approved"]
    certain = [_CLASSIFIERS[n] for n in named if n in _CLASSIFIERS]
    # "BSD License" names a family: with one such classifier the whole is uncertain
    if named and len(certain) == len(named):
        return Licence(_joined(certain), reason="METADATA classifiers")
    if text:
        return Licence(name=_short(text), reason="METADATA License, free text")
    if named:
        return Licence(name=_short(", ".join(named)), reason="METADATA classifiers, not exact")
    return Licence(reason="its METADATA names no licence")


def source_licence(text: str) -> Licence:
    """The licence of a source that we compile, as its source.yaml states it."""
    reason = "source.yaml; what the source vendors may have others"
    if expression := _expression(text):
        return Licence(expression, reason=reason)
    return Licence(name=_short(text) or None, reason=reason)


def _expression(text: str) -> str | None:
    try:
        return str(canonicalize_license_expression(text)) if text else None
    except InvalidLicenseExpression:
        return None


def _short(text: str, longest: int = _LONGEST_NAME) -> str:
    """Shortens a free text to a name: its first line, not the whole licence."""
    first = next((line.strip() for line in plain(text).split("\n") if line.strip()), "")
    return first if len(first) <= longest else first[:longest] + "…"


def deb_licence(copyright_file: bytes) -> Licence:
    """Reads a .deb's copyright file, if it is in the machine-readable format."""
    # some are older than UTF-8; the names of licences are ASCII
    text = copyright_file.decode("utf-8", errors="replace")
    # older drafts of the format had the longer name
    if not re.match(r"\s*Format(-Specification)?:", text):
        return Licence(reason="its copyright file is not machine-readable")
    names = list(dict.fromkeys(line.strip() for line in _LICENSE_LINE.findall(text)))
    if not names:
        return Licence(reason="its copyright file names no licence")
    reason = "copyright file, Debian's names, not all of them SPDX's"
    unsure = Licence(name=_short(", ".join(names), _LONGEST_LIST), reason=reason)
    terms = []
    for line in names:
        # `GPL-2+ or Expat` as an SPDX expression, unless one of the names has none
        alternatives = []
        for alternative in re.split(r"\s+or\s+", line):
            all_of = []
            for name in (t for t in re.split(r",?\s+and\s+|,\s*", alternative) if t):
                known = _DEBIAN.get(name.lower())
                if known is None and (gnu := _GNU.match(name)):
                    kind, major, minor, plus = gnu.groups()
                    known = f"{kind}-{major}.{minor or 0}-{'or-later' if plus else 'only'}"
                if known is None:
                    known = _expression(name) if " " not in name else None
                if known is None:
                    return unsure
                all_of.append(known)
            alternatives.append(_joined(all_of))
        terms.append(" OR ".join(sorted(set(alternatives))))
    if expression := _expression(_joined(terms)):
        return Licence(expression, reason="copyright file, all of the source package")
    return unsure


def _joined(terms: list[str]) -> str:
    unique = sorted(set(terms))
    # AND binds more tightly than OR in SPDX expressions
    grouped = [f"({t})" if " OR " in t and len(unique) > 1 else t for t in unique]
    return " AND ".join(grouped)
