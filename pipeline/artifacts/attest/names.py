"""Names of predicates, media types and materials: standard ones where they exist, else own URNs.

Own names are URNs, not addresses, so that nothing in a signed statement depends on a web site.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from pydantic import AfterValidator

_OWN = "urn:sm120-pipeline"

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PAYLOAD = "application/vnd.in-toto+json"

PROVENANCE = "https://slsa.dev/provenance/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
CYCLONEDX = "https://cyclonedx.org/bom"
SPDX = "https://spdx.dev/Document/v2.3"
REBUILD = f"{_OWN}:predicate:rebuild:v1"
WEIGHTS = f"{_OWN}:predicate:weights:v1"
HOST_FACTS = f"{_OWN}:predicate:host-facts:v1"
BENCHMARK_RUN = f"{_OWN}:predicate:benchmark-run:v2"
REPORT = f"{_OWN}:predicate:report:v2"
COMPILED_FILE = f"{_OWN}:predicate:compiled-file:v1"
UNGATED = f"{_OWN}:predicate:ungated:v1"
AUDIT = f"{_OWN}:predicate:audit:v1"  # which known vulnerabilities an image has
KERNEL_TABLE = f"{_OWN}:predicate:kernel-table:v1"  # measured on a card, for one recipe
EVIDENCE_SET = f"{_OWN}:predicate:evidence-set:v1"
OBJECTS = f"{_OWN}:predicate:objects:v1"  # about the manifest of an export of compiled objects
BUNDLE = f"{_OWN}:predicate:bundle:v1"  # about the manifest of a bundle
COMPILED_TREE = f"{_OWN}:predicate:compiled-tree:v1"  # about the layer of a compiled tree
# cosign's own signature over an image's digest; not a statement, but a key may be for it alone
IMAGE_SIGNATURE = "cosign container image signature"

BUILD_TYPE = f"{_OWN}:build:image:v1"
BUILDER = f"{_OWN}:builder:local"

KINDS = {
    "provenance": PROVENANCE,
    "test-result": TEST_RESULT,
    "cyclonedx": CYCLONEDX,
    "spdx": SPDX,
    "rebuild": REBUILD,
    "weights": WEIGHTS,
    "host-facts": HOST_FACTS,
    "benchmark-run": BENCHMARK_RUN,
    "report": REPORT,
    "ungated": UNGATED,
    "audit": AUDIT,
    "kernel-table": KERNEL_TABLE,
    "evidence-set": EVIDENCE_SET,
    "objects": OBJECTS,
    "compiled-tree": COMPILED_TREE,
    "compiled-file": COMPILED_FILE,
    "bundle": BUNDLE,
    "image-signature": IMAGE_SIGNATURE,
}

# Stated of a foreign base: a digest pins its bytes, and nobody examined its contents.
UNLISTED = "unknown: taken as published by digest; nothing here lists what it holds"

# Stated of what compiled trees are made with: it took part in the build and is not in the image.
BUILD_TIME = "build time only: it is not in the image"

# Bills of materials also travel as plain files of these types.
BILL_MEDIA = {CYCLONEDX: "application/vnd.cyclonedx+json", SPDX: "application/spdx+json"}


def predicate_kind(predicate_type: str) -> str:
    """The short name of a predicate type; a foreign one is its own name."""
    return next((kind for kind, uri in KINDS.items() if uri == predicate_type), predicate_type)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"no such kind of evidence (the kinds are: {', '.join(KINDS)})")
    return kind


Kind = Annotated[str, AfterValidator(_known)]


# https://github.com/package-url/purl-spec; visible ASCII, as no other character needs to be in one
_PURL = re.compile(
    r"pkg:([a-z][a-z0-9.+-]*)/((?:[^/@?#]+/)*)([^/@?#]+)@([^?#]+)(?:\?([^#]*))?(?:#.*)?"
)


class PackageUrl(NamedTuple):
    """A package URL with a version, in its parts."""

    kind: str
    namespace: str
    name: str
    version: str
    qualifiers: dict[str, str]


def parse_purl(text: str) -> PackageUrl | None:
    """Splits a package URL; none if it is not valid or names no version."""
    found = _PURL.fullmatch(text) if text.isascii() and text.isprintable() else None
    if found is None or len(text) > 1000:
        return None
    namespace, name, version = (unquote(found[x]) for x in (2, 3, 4))
    qualifiers = dict(parse_qsl(found[5] or ""))
    return PackageUrl(found[1], namespace.strip("/"), name, version, qualifiers)


def wheel_purl(name: str, version: str, file: str) -> str:
    """A wheel as a package URL, with its file name and no place."""
    return f"pkg:pypi/{name}@{quote(version, safe='')}?file_name={quote(file, safe='')}"


def deb_purl(name: str, version: str, architecture: str, **more: str) -> str:
    """A Debian package as a package URL, with qualifiers after its architecture."""
    place = f"?arch={architecture}" + "".join(f"&{k}={quote(v, safe='')}" for k, v in more.items())
    return f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}{place}"


def image_purl(name: str, digest: str, architecture: str) -> str:
    """An image as a package URL."""
    return f"pkg:oci/{name}@{quote(digest, safe='')}?arch={architecture}"


def archive_purl(kind: str, name: str, version: str, file: str, sha256: str) -> str:
    """A source archive as a package URL; a user's own has its hash in place of a version."""
    if kind == "sdist":
        return wheel_purl(name, version, file)
    if kind == "debian":
        return deb_purl(name, version, "source", file_name=file)
    return f"pkg:generic/{quote(name, safe='')}@{sha256}?file_name={quote(file, safe='')}"


def source_urn(source: str) -> str:
    """The archive of a source that is compiled here."""
    return f"{_OWN}:source:{source}"


def tree_urn(source: str, build: str) -> str:
    """A compiled tree."""
    return f"{_OWN}:tree:{source}:{build}"


def toolchain_urn(image: str, digest: str) -> str:
    """An image that trees are compiled in."""
    return f"{_OWN}:toolchain:{image}:{digest.removeprefix('sha256:')}"


def build_time_urn(toolchain: str, platform: str, purl: str) -> str:
    """A package of a toolchain; the image may hold the same one for itself."""
    return f"{_OWN}:build-time:{toolchain}:{platform.replace('/', '-')}:{quote(purl, safe='')}"


def file_urn(path: str) -> str:
    """A file of the checkout."""
    return f"{_OWN}:checkout:{quote(path)}"


def layer_urn(image: str, title: str) -> str:
    """A layer of a base image."""
    return f"{_OWN}:layer:{image}:{quote(title, safe='')}"


def committed_urn(what: Literal["lock", "golden"], image: str, platform: str) -> str:
    """An image's lock, or the golden digest that it must have."""
    return f"{_OWN}:{what}:{image}:{platform.replace('/', '-')}"
