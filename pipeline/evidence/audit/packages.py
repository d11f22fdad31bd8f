"""The packages of a bill of materials as advisories name them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name

from pipeline.artifacts.attest.names import parse_purl
from pipeline.core.errors import RecordInvalid
from pipeline.evidence.audit.advisories import DEBIAN
from pipeline.evidence.statements.vendored import CYCLONEDX_READ, listed_components

# types of package URLs, and what OSV calls the same: https://ossf.github.io/osv-schema/
_ECOSYSTEMS = {"pypi": "PyPI", "deb/debian": "Debian", "cargo": "crates.io", "npm": "npm"}
_ECOSYSTEMS |= {"golang": "Go"}
# a rebuild of the same source on Debian's machines
_BINARY_REBUILD = re.compile(r"\+b\d+$")


@dataclass(frozen=True)
class BilledPackage:
    """A package of a bill; for a .deb also its source, which advisories name."""

    purl: str
    ecosystem: str  # empty where no advisory could be about it
    name: str
    version: str
    release: str = ""
    binary: str = ""  # the name of the .deb
    via: str = ""  # the package URL of the wheel that it is inside
    ref: str = ""  # by which its bill names it

    @property
    def title(self) -> str:
        name = f"{self.binary or self.name} {self.version}".strip()
        owner = parse_purl(self.via) if self.via else None
        return f"{name} in {owner.name}" if owner else name


def packages_of(bill: dict[str, Any], what: str) -> list[BilledPackage]:
    """Every package in a CycloneDX bill, but for those that only took part in its build."""
    version = bill.get("specVersion")
    if bill.get("bomFormat") != "CycloneDX" or version not in CYCLONEDX_READ:
        known = ", ".join(CYCLONEDX_READ)
        raise RecordInvalid(f"{what}: is no bill in CycloneDX {known}")
    components = bill.get("components") or []
    if not isinstance(components, list) or not all(isinstance(x, dict) for x in components):
        raise RecordInvalid(f"{what}: its components are no list of objects")
    found = []
    for each in components:
        if each.get("scope") == "excluded":
            continue
        owner, ref = str(each.get("purl", "")), str(each.get("bom-ref", ""))
        found += [*_package(each, "", ref)]
        for inside in listed_components(each):
            # what a wheel carries inside is fixed by another version of the wheel
            found += [*_package(inside, owner, str(inside.get("bom-ref") or ref))]
    return list(dict.fromkeys(found))


def _package(component: dict[str, Any], via: str, ref: str) -> Iterator[BilledPackage]:
    purl = component.get("purl")
    url = parse_purl(purl) if isinstance(purl, str) else None
    if url is None or not isinstance(purl, str):
        # a library inside a wheel that has only a name: it is counted, but cannot be compared
        if via and component.get("type") == "library":
            name, version = (str(component.get(x) or "") for x in ("name", "version"))
            yield BilledPackage("", "", name, version, via=via, ref=ref)
        return
    kind = url.kind if url.kind != "deb" else f"deb/{url.namespace}"
    ecosystem, name, version = _ECOSYSTEMS.get(kind, ""), url.name, url.version
    release = binary = ""
    if ecosystem == "PyPI":
        name = canonicalize_name(name)
    elif ecosystem in ("npm", "Go") and url.namespace:
        name = f"{url.namespace}/{name}"
    elif ecosystem == "Debian":
        properties = component.get("properties")
        noted = (
            [x for x in properties if isinstance(x, dict)] if isinstance(properties, list) else []
        )
        sources = [str(x.get("value")) for x in noted if x.get("name") == "sm120:source"]
        # syft and others write the source into the package URL
        upstream = url.qualifiers.get("upstream", "").partition("@")[0]
        suite = url.qualifiers.get("distro", "").removeprefix("debian-").partition(".")[0]
        binary, name = name, next(iter(sources), "") or upstream or name
        version, release = _BINARY_REBUILD.sub("", version), DEBIAN.get(suite, suite)
    yield BilledPackage(purl, ecosystem, name, version, release, binary, via, ref)
