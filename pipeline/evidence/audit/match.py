"""Matches packages with advisories: what is affected, what is unclear, and what is accepted."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packaging.utils import canonicalize_name

from pipeline.artifacts.attest.predicates import SEVERITIES, AcceptedRisk, KnownVulnerability
from pipeline.artifacts.attest.statement import stamp
from pipeline.evidence.audit.advisories import Advisory, Affected, is_affected, order_key
from pipeline.evidence.audit.database import AdvisoryDatabase
from pipeline.evidence.audit.packages import BilledPackage
from pipeline.images.spec.image import AcceptedAdvisory

_COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq}
_HOLDS = re.compile(
    r"(?:(pypi|deb|cargo|npm|golang):)?([A-Za-z0-9@._+/-]+?)\s*(<=|<|==)\s*([^\s<>=]+)"
)
_KINDS = {"pypi": "PyPI", "deb": "Debian", "cargo": "crates.io", "npm": "npm", "golang": "Go"}


class Matched(NamedTuple):
    """The result: findings, the worst first, and what could not be compared."""

    findings: list[KnownVulnerability]
    undecided: list[str]
    unmatched: int


def match_packages(
    packages: Sequence[BilledPackage],
    database: AdvisoryDatabase,
    accepted: Sequence[AcceptedAdvisory] = (),
) -> Matched:
    """Compare every package with every advisory about it."""
    findings: list[KnownVulnerability] = []
    undecided: list[str] = []
    for package in packages:
        hits: list[tuple[Advisory, Affected]] = []
        for advisory, about in database.about.get((package.ecosystem, package.name), []):
            # Debian 12 and 13 have their own fixes; a bill that names no release cannot choose
            if about.release and package.release and about.release != package.release:
                continue
            answer = is_affected(about, package.version)
            if answer is None or (answer and about.release and not package.release):
                undecided.append(f"{package.title}: {advisory.id}")
            elif answer:
                hits.append((advisory, about))
        # GHSA, PYSEC and CVE records of one vulnerability are one finding
        merged: list[tuple[set[str], list[tuple[Advisory, Affected]]]] = []
        for hit in hits:
            names, group = {hit[0].id, *hit[0].aliases}, [hit]
            for known in [x for x in merged if x[0] & names]:
                merged.remove(known)
                names, group = names | known[0], [*known[1], *group]
            merged.append((names, group))
        for names, group in merged:
            # the name that most people know first
            identity = min(names, key=lambda x: (not x.startswith("CVE-"), x[:5] != "GHSA-", x))
            published = min((a.published for a, _ in group if a.published), default=None)
            keys = {
                at: order_key(package.ecosystem, at) for _, about in group for at in about.fixed
            }
            own = order_key(package.ecosystem, package.version)
            # fixes of older branches are no way forward
            later = [
                at for at, key in keys.items() if key is not None and own is not None and key > own
            ]
            owned = (None, package.name, package.binary)
            match = next((x for x in accepted if x.id in names and x.package in owned), None)
            risk = None
            if match:
                reason, until = match.reason, match.until.isoformat()
                how = match.justification
                risk = AcceptedRisk(reason=reason, until=until, justification=how)
            findings.append(
                KnownVulnerability(
                    id=identity,
                    aliases=sorted(names - {identity}),
                    package=package.binary or package.name,
                    version=package.version,
                    purl=package.purl,
                    via=package.via or None,
                    severity=max((a.severity for a, _ in group), key=SEVERITIES.index),
                    published=stamp(published) if published else None,
                    fixed=sorted(later, key=lambda at: keys[at]),
                    accepted=risk,
                )
            )
    # the worst first; of two packages of one source, such as libc6 and libc-bin, both stay
    findings.sort(key=lambda f: (-SEVERITIES.index(f.severity), f.package, f.version, f.id))
    others = sum(1 for x in packages if not x.ecosystem)
    return Matched(findings, sorted(set(undecided)), others)


@dataclass(frozen=True)
class HeldPackage:
    """A package below a version, as in `urllib3<2.5` or `deb:openssl<3.0.17-1`."""

    ecosystem: str
    name: str
    comparison: str
    version: str

    def accepts(self, package: BilledPackage) -> bool:
        """Whether a package matches; a .deb may match by its source, too."""
        name = canonicalize_name(self.name) if package.ecosystem == "PyPI" else self.name
        if self.ecosystem not in ("", package.ecosystem) or not package.ecosystem:
            return False
        if name not in (package.name, package.binary):
            return False
        own, wanted = (order_key(package.ecosystem, x) for x in (package.version, self.version))
        return own is not None and wanted is not None and _COMPARE[self.comparison](own, wanted)


def parse_held(text: str) -> HeldPackage:
    """Parses what a user asks for; a ValueError shows the form."""
    found = _HOLDS.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is not NAME<VERSION, such as urllib3<2.5 or deb:openssl<3.0.17-1"
        )
    kind = _KINDS.get(found[1] or "", "")
    known = [x for x in ([kind] if kind else _KINDS.values()) if order_key(x, found[4]) is not None]
    if not known:
        raise ValueError(f"{found[4]!r} is not a version that can be compared")
    return HeldPackage(kind, found[2], found[3], found[4])
