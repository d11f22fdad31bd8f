"""A bill of materials as SPDX 2.3 JSON, the same bytes for the same image."""

from __future__ import annotations

import re
from typing import Any

from pipeline import __version__
from pipeline.assemble.manifest import CREATED
from pipeline.attest.names import BUILD_TIME, UNLISTED
from pipeline.attest.strict import plain
from pipeline.evidence.bill import Bill, BilledPart, BilledTree
from pipeline.evidence.compiled import ImageTree, Toolchain, ToolchainPart
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
        "packages": [
            *(_image(bill), *_base(bill), *layers, *parts, *files, *patches),
            *_compiled(bill),
        ],
        "relationships": _relationships(bill),
        "hasExtractedLicensingInfos": _references(bill),
    }


def _references(bill: Bill) -> list[dict[str, str]]:
    """Licences that packages name by a reference of their own; SPDX wants them declared."""
    licences = [*(x.licence for x in bill.parts), *(x.licence for x in bill.trees)]
    expressions = " ".join(licence.expression or "" for licence in licences)
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
    relations += [_relation(IMAGE_ID, "CONTAINS", _file_id(x)) for x in bill.files]
    return relations + _compiled_relations(bill)


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


def _compiled(bill: Bill) -> list[dict[str, Any]]:
    """Compiled trees, and what they were compiled from and in."""
    packages = [_tree(x) for x in bill.trees]
    packages += [_archive(x.tree) for x in bill.trees]
    packages += [
        _build_time(_toolchain_id(x), x.name, x.digest, x.purl, x.digest) for x in bill.toolchains
    ]
    packages += [
        _build_time(_tool_id(x, p), p.pin.name, p.pin.sha256, p.purl, p.pin.version)
        for x in bill.toolchains
        for p in x.parts
    ]
    packages += [_own_file(x) for x in bill.build_files]
    # two builds of one source have one archive
    return list({x["SPDXID"]: x for x in packages}.values())


def _tree(billed: BilledTree) -> dict[str, Any]:
    tree, licence = billed.tree, billed.licence
    source = tree.plan.source
    return _package(
        _tree_id(tree),
        source.name,
        tree.layer.record.digest,
        versionInfo=source.upstream.commit,
        primaryPackagePurpose="APPLICATION",
        licenseDeclared=licence.expression or _NONE,
        licenseComments=f"{licence.name or licence.expression or _NONE}: {licence.reason}",
        comment=f"compiled as {tree.plan.name} in {tree.made.toolchain}",
        externalRefs=[_purl(tree.purl)],
    )


def _archive(tree: ImageTree) -> dict[str, Any]:
    pin = tree.plan.lock.archive
    return _package(
        _archive_id(tree),
        pin.name,
        pin.sha256,
        versionInfo=pin.version or tree.plan.source.upstream.commit,
        packageFileName=pin.file,
        primaryPackagePurpose="SOURCE",
        comment=f"{BUILD_TIME}; its files are {tree.plan.lock.tree}",
        externalRefs=[_purl(tree.archive_purl)],
    )


def _build_time(identity: str, name: str, digest: str, purl: str, version: str) -> dict[str, Any]:
    notes: dict[str, Any] = {"versionInfo": version, "comment": BUILD_TIME}
    return _package(identity, name, digest, **notes, externalRefs=[_purl(purl)])


def _compiled_relations(bill: Bill) -> list[dict[str, str]]:
    relations = []
    for billed in bill.trees:
        tree, identity = billed.tree, _tree_id(billed.tree)
        relations.append(_relation(_layer_id(tree.layer.record.digest), "CONTAINS", identity))
        relations.append(_relation(identity, "GENERATED_FROM", _archive_id(tree)))
        relations += [_relation(_file_id(p), "PATCH_FOR", identity) for p in billed.patches]
        for toolchain in bill.toolchains:
            if toolchain.digest == tree.made.toolchain:
                relations.append(_relation(_toolchain_id(toolchain), "BUILD_TOOL_OF", identity))
    relations += [
        _relation(_toolchain_id(x), "CONTAINS", tool)
        for x in bill.toolchains
        for tool in dict.fromkeys(_tool_id(x, p) for p in x.parts)
    ]
    return relations


def _tree_id(tree: ImageTree) -> str:
    return _id("Tree", f"{tree.plan.source.name}-{tree.plan.name}")


def _archive_id(tree: ImageTree) -> str:
    return _id("Source", f"{tree.plan.source.name}-{tree.plan.lock.archive.sha256[:12]}")


def _toolchain_id(toolchain: Toolchain) -> str:
    return _id("Toolchain", f"{toolchain.name}-{toolchain.digest[7:19]}")


def _tool_id(toolchain: Toolchain, part: ToolchainPart) -> str:
    pin = part.pin
    return _id("Tool", f"{toolchain.name}-{pin.name}-{pin.version}-{pin.sha256[:12]}")
