"""A bill of materials as SPDX 2.3 JSON, the same bytes for the same image."""

from __future__ import annotations

import re
from typing import Any

from pipeline import __version__
from pipeline.assemble.manifest import CREATED
from pipeline.attest.names import UNLISTED
from pipeline.attest.strict import plain
from pipeline.evidence.bill import Bill, BilledPart
from pipeline.evidence.inventory import OwnFile, PlacedLayer
from pipeline.model import canonical_json

_NONE = "NOASSERTION"
_DOCUMENT = "SPDXRef-DOCUMENT"
IMAGE_ID = "SPDXRef-Image"
_BASE = "SPDXRef-BaseImage"


def spdx(bill: Bill) -> dict[str, Any]:
    """The document: the image holds layers, layers hold packages, patches are for packages."""
    # a foreign base may hold one layer twice
    layers = [_layer(x) for x in {x.layer.record.digest: x for x in bill.layers}.values()]
    parts = [_part(x) for x in bill.parts]
    files = [_own_file(x) for x in bill.files]
    patches = [_own_file(x) for x in bill.patches]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": _DOCUMENT,
        "name": f"{bill.image}-{bill.version}",
        "documentNamespace": f"urn:sm120-pipeline:spdx:{bill.digest.removeprefix('sha256:')}",
        "creationInfo": {
            # SPDX requires a time; the image's own fixed one says nothing that is not so
            "created": CREATED,
            "creators": [f"Tool: sm120-pipeline-{__version__}"],
            "comment": "The time is fixed, so that an image has one document.",
        },
        "packages": [_image(bill), *_base(bill), *layers, *parts, *files, *patches],
        "relationships": _relationships(bill),
        "hasExtractedLicensingInfos": _references(bill),
    }


def _references(bill: Bill) -> list[dict[str, str]]:
    """Licences that packages name by a reference of their own; SPDX wants them declared."""
    expressions = " ".join(x.licence.expression or "" for x in bill.parts)
    return [
        {
            "licenseId": reference,
            "name": reference.removeprefix("LicenseRef-"),
            "extractedText": "Not extracted: the text is in the licence files of the packages.",
        }
        for reference in sorted(set(re.findall(r"LicenseRef-[A-Za-z0-9.-]+", expressions)))
    ]


def spdx_bytes(bill: Bill) -> bytes:
    """The document as a file."""
    return canonical_json(spdx(bill)) + b"\n"


def _relationships(bill: Bill) -> list[dict[str, str]]:
    relations = [_relation(_DOCUMENT, "DESCRIBES", IMAGE_ID)]
    layers = dict.fromkeys(_layer_id(x.layer.record.digest) for x in bill.layers)
    relations += [_relation(IMAGE_ID, "CONTAINS", layer) for layer in layers]
    for billed in bill.parts:
        layer, part = _layer_id(billed.part.layer.record.digest), _part_id(billed)
        relations.append(_relation(layer, "CONTAINS", part))
        relations += [_relation(_file_id(p), "PATCH_FOR", part) for p in billed.patches]
    if bill.base:
        relations.append(_relation(IMAGE_ID, "DESCENDANT_OF", _BASE))
        # as in `layers` above: one relation for a layer that stands there twice
        own = dict.fromkeys(_layer_id(layer.digest) for layer in bill.base.pin.layers)
        relations += [_relation(_BASE, "CONTAINS", layer) for layer in own]
    return relations + [_relation(IMAGE_ID, "CONTAINS", _file_id(x)) for x in bill.files]


def _relation(one: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}


def _id(kind: str, text: str) -> str:
    # letters, digits, dots and dashes are all that an SPDX id may have
    return f"SPDXRef-{kind}-{re.sub(r'[^A-Za-z0-9.-]', '-', text)}"


def _layer_id(digest: str) -> str:
    return _id("Layer", digest.removeprefix("sha256:"))


def _part_id(billed: BilledPart) -> str:
    pin = billed.part.pin
    kind = "Wheel" if billed.part.is_wheel else "Deb"
    # the hash tells apart what the cleaned name does not
    return _id(kind, f"{pin.name}-{pin.version}-{pin.sha256[:12]}")


def _file_id(file: OwnFile) -> str:
    return _id("Patch" if file.patch else "File", f"{file.path}-{file.digest[7:19]}")


def _package(identity: str, name: str, digest: str, **more: Any) -> dict[str, Any]:
    return {
        "SPDXID": identity,
        "name": name,
        "downloadLocation": _NONE,
        # with files, SPDX wants a verification code over all of them; layers have digests instead
        "filesAnalyzed": False,
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest.removeprefix("sha256:")}],
        "licenseConcluded": _NONE,
        "licenseDeclared": _NONE,
        "copyrightText": _NONE,
        **more,
    }


def _image(bill: Bill) -> dict[str, Any]:
    return _package(
        IMAGE_ID,
        bill.image,
        bill.digest,
        versionInfo=bill.version,
        primaryPackagePurpose="CONTAINER",
        externalRefs=[_purl(bill.purl)],
    )


def _base(bill: Bill) -> list[dict[str, Any]]:
    if bill.base is None:
        return []
    digest = bill.base.pin.manifest.digest
    package = _package(
        _BASE,
        bill.base.pin.repository,
        digest,
        versionInfo=digest,
        primaryPackagePurpose="CONTAINER",
        licenseComments=f"{_NONE}: it is not known what it holds",
        comment=UNLISTED,
        externalRefs=[_purl(bill.base.purl)],
    )
    return [package]


def _layer(placed: PlacedLayer) -> dict[str, Any]:
    digest = placed.layer.record.digest
    return _package(
        _layer_id(digest),
        placed.layer.title,
        digest,
        primaryPackagePurpose="ARCHIVE",
        comment=f"a layer of {placed.image}; diffID {placed.layer.record.diff_id}",
    )


def _part(billed: BilledPart) -> dict[str, Any]:
    part, licence = billed.part, billed.licence
    comment = licence.reason if licence.expression else f"{licence.name or _NONE}: {licence.reason}"
    return _package(
        _part_id(billed),
        part.pin.name,
        part.pin.sha256,
        versionInfo=part.pin.version,
        packageFileName=part.pin.file,
        primaryPackagePurpose="LIBRARY",
        licenseDeclared=licence.expression or _NONE,
        licenseComments=comment,
        externalRefs=[_purl(part.purl)],
    )


def _purl(purl: str) -> dict[str, str]:
    return {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": purl,
    }


def _own_file(file: OwnFile) -> dict[str, Any]:
    comment = plain(file.patch.why) if file.patch else f"lies at {file.to}"
    return _package(
        _file_id(file),
        file.path.rpartition("/")[2],
        file.digest,
        packageFileName=file.path,
        primaryPackagePurpose="SOURCE" if file.patch else "FILE",
        comment=comment,
    )
