"""A bill of materials as CycloneDX 1.6 and as SPDX 2.3 JSON, the same bytes for the same image."""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.artifacts.attest.names import BUILD_TIME, UNLISTED
from pipeline.artifacts.attest.strict import plain
from pipeline.core.model import canonical_json
from pipeline.evidence.statements.bill import Bill, BilledPart, BilledTree
from pipeline.evidence.statements.inventory import ImagePart, ImageTree, OwnFile, Toolchain
from pipeline.evidence.statements.licence import Licence
from pipeline.images.assemble.image import CREATED
from pipeline.images.lock.model import DebPin, Pin

# chosen once, for serial numbers that follow from the image's digest
_NAMESPACE = uuid.UUID("6f0c9a3e-5a0d-5d0f-8a43-0f5f0c5d3b1e")
_NONE = "NOASSERTION"
_DOCUMENT = "SPDXRef-DOCUMENT"
IMAGE_ID = "SPDXRef-Image"
_BASE = "SPDXRef-BaseImage"


def cyclonedx(bill: Bill) -> dict[str, Any]:
    """The document. It holds no time, so that an image has one bill."""
    tool = {"type": "application", "name": "sm120-pipeline", "version": __version__}
    layers = [
        (f"layer:{x.layer.record.digest}", f"{x.image}: {x.layer.title}") for x in bill.layers
    ]
    image = _component("container", bill.purl, bill.image, bill.version, bill.digest)
    components = _in_the_image(bill)
    refs: dict[str, Collection[str]] = {bill.purl: [x["bom-ref"] for x in components]}
    # from each tree to its source and its toolchain, and from that to its packages
    purls = {x.digest: x.purl for x in bill.toolchains}
    for tree in (x.tree for x in bill.trees):
        refs[tree.purl] = {tree.archive_purl, purls[tree.made.toolchain]}
    refs |= {x.purl: {p.urn for p in x.parts} for x in bill.toolchains}
    # the contents of a foreign base, and what the source of a tree vendors, are not listed
    unlisted = [*([bill.base.purl] if bill.base else []), *(x.tree.purl for x in bill.trees)]
    compositions = [
        {"aggregate": "incomplete", "assemblies": [bill.purl]},
        {"aggregate": "unknown", "assemblies": unlisted},
    ]
    if not unlisted:
        # claimed because the image was assembled from nothing else
        compositions = [{"aggregate": "complete", "assemblies": [bill.purl]}]
    # sources and toolchains of trees; CycloneDX calls excluded what is not shipped
    build_time: list[tuple[dict[str, Any], list[tuple[str, str]]]] = []
    for tree in (x.tree for x in bill.trees):
        pin, lock = tree.plan.lock.archive, tree.plan.lock
        version = pin.version or tree.plan.source.upstream.commit
        body = _component("library", tree.archive_purl, pin.name, version, pin.sha256)
        build_time.append((body, [("file", pin.file), ("files:digest", lock.tree)]))
    for x in bill.toolchains:
        build_time.append((_component("container", x.purl, x.name, x.digest, x.digest), []))
    for x in bill.toolchains:
        for p in x.parts:
            body = _component("library", p.purl, p.pin.name, p.pin.version, p.pin.sha256)
            # the image may hold the same package for itself
            build_time.append((body | {"bom-ref": p.urn}, [("toolchain", x.name)]))
    excluded = [
        body | {"scope": "excluded"} | _properties([("use", BUILD_TIME), *notes])
        for body, notes in build_time
    ]
    excluded += [_own_file(x) | {"name": x.path, "scope": "excluded"} for x in bill.build_files]
    # two builds of one source have one archive
    components += {x["bom-ref"]: x for x in excluded}.values()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, bill.digest)}",
        "version": 1,
        "metadata": {
            "tools": {"components": [tool]},
            "component": image | _properties([("platform", bill.platform), *layers]),
        },
        "components": components,
        "dependencies": [
            {"ref": purl, "dependsOn": sorted(needed)} for purl, needed in refs.items()
        ],
        "compositions": compositions,
    }


def cyclonedx_bytes(bill: Bill) -> bytes:
    """The document as a file."""
    return canonical_json(cyclonedx(bill)) + b"\n"


def _component(kind: str, purl: str, name: str, version: str, digest: str) -> dict[str, Any]:
    body = {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return {**body, "hashes": _hashes(digest)}


def _hashes(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}]


def _properties(values: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {"properties": [{"name": f"sm120:{name}", "value": value} for name, value in values]}


def _in_the_image(bill: Bill) -> list[dict[str, Any]]:
    components = []
    if bill.base:
        pin = bill.base.pin
        notes = [
            ("contents", UNLISTED),
            ("licence:source", "NOASSERTION: it is not known what it holds"),
            *([("index", pin.index.digest)] if pin.index else []),
            *(("layer", layer.digest) for layer in pin.layers),
        ]
        digest = pin.manifest.digest
        base = _component("container", bill.base.purl, pin.repository, digest, digest)
        components.append(base | _properties(notes))
    for billed in bill.parts:
        part, layer = billed.part, billed.part.layer
        notes = [
            ("file", part.pin.file),
            ("layer", layer.record.digest),
            ("layer:title", layer.title),
            ("licence:source", _licence_source(billed.licence)),
            *(("sbom:unread", why) for why in billed.vendored.unread),
        ]
        if isinstance(part.pin, DebPin) and part.pin.source:
            # what advisories name: they are about sources, not about what was built of them
            notes.append(("source", part.pin.source))
        body = _component(
            "library", part.purl, part.pin.name, part.pin.version, part.pin.sha256
        ) | _properties(notes)
        # its own bills (PEP 770) name no hashes of them, and often no version or package URL
        libraries = [
            {"type": "library", **{k: v for k, v in x._asdict().items() if v}}
            for x in billed.vendored.libraries
        ]
        body |= {"components": libraries} if libraries else {}
        components.append(body | _changes(billed, bill.root))
    components += [_own_file(x) for x in bill.files]
    for billed_tree in bill.trees:
        tree, source = billed_tree.tree, billed_tree.tree.plan.source
        notes = [
            ("build", tree.plan.name),
            ("layer", tree.layer.record.digest),
            ("layer:title", tree.layer.title),
            ("licence:source", _licence_source(billed_tree.licence)),
            ("toolchain", tree.made.toolchain),
            ("upstream", plain(source.upstream.repository)),
        ]
        commit, digest = source.upstream.commit, tree.layer.record.digest
        body = _component("application", tree.purl, source.name, commit, digest)
        changes = _changes(billed_tree, bill.root)
        pedigree = {"commits": [{"uid": commit}], **changes.get("pedigree", {})}
        components.append(body | _properties(notes) | changes | {"pedigree": pedigree})
    return components


def _licence_source(licence: Licence) -> str:
    known = licence.expression or licence.name
    return licence.reason if known else f"NOASSERTION: {licence.reason}"


def _changes(billed: BilledPart | BilledTree, root: Path) -> dict[str, Any]:
    """The licence of a component, and our patches of it."""
    patches = []
    for file, patch in ((file, file.patch) for file in billed.patches if file.patch):
        content = base64.b64encode((root / file.path).read_bytes()).decode()
        text = {"contentType": "text/x-diff", "encoding": "base64", "content": content}
        issue: dict[str, Any] = {"type": "defect", "id": file.path, "name": file.digest}
        issue |= {"description": plain(patch.why), "references": list(patch.upstream)}
        patches.append({"type": "unofficial", "diff": {"text": text}, "resolves": [issue]})
    body: dict[str, Any] = {"pedigree": {"patches": patches}, "modified": True} if patches else {}
    if billed.licence.expression:
        body["licenses"] = [{"expression": billed.licence.expression}]
    elif billed.licence.name:
        body["licenses"] = [{"license": {"name": billed.licence.name}}]
    return body


def _own_file(file: OwnFile) -> dict[str, Any]:
    body = {"type": "file", "bom-ref": file.urn, "name": file.to, "hashes": _hashes(file.digest)}
    return body | _properties([("file", file.path), ("image", file.image)])


def spdx(bill: Bill) -> dict[str, Any]:
    """The document: the image holds layers, layers hold packages, patches are for packages."""
    licences = [*(x.licence for x in bill.parts), *(x.licence for x in bill.trees)]
    expressions = " ".join(licence.expression or "" for licence in licences)
    # licences that packages name by a reference of their own; SPDX wants them declared
    references = sorted(set(re.findall(r"LicenseRef-[A-Za-z0-9.-]+", expressions)))
    text = "Not extracted: the text is in the licence files of the packages."
    relations = [(_DOCUMENT, "DESCRIBES", IMAGE_ID)]
    # one relation for a layer that the image, or its base, has twice
    layers = dict.fromkeys(_layer_id(x.layer.record.digest) for x in bill.layers)
    relations += [(IMAGE_ID, "CONTAINS", layer) for layer in layers]
    for billed in bill.parts:
        part = _part_id(billed.part)
        relations.append((_layer_id(billed.part.layer.record.digest), "CONTAINS", part))
        relations += [(_file_id(p), "PATCH_FOR", part) for p in billed.patches]
    if bill.base:
        relations.append((IMAGE_ID, "DESCENDANT_OF", _BASE))
        own = dict.fromkeys(_layer_id(layer.digest) for layer in bill.base.pin.layers)
        relations += [(_BASE, "CONTAINS", layer) for layer in own]
    relations += [(IMAGE_ID, "CONTAINS", _file_id(x)) for x in bill.files]
    for billed_tree in bill.trees:
        tree, identity = billed_tree.tree, _tree_id(billed_tree.tree)
        relations.append((_layer_id(tree.layer.record.digest), "CONTAINS", identity))
        relations.append((identity, "GENERATED_FROM", _archive_id(tree)))
        relations += [(_file_id(p), "PATCH_FOR", identity) for p in billed_tree.patches]
        made_in = (x for x in bill.toolchains if x.digest == tree.made.toolchain)
        relations += [(_toolchain_id(x), "BUILD_TOOL_OF", identity) for x in made_in]
    for toolchain in bill.toolchains:
        tools = dict.fromkeys(_tool_id(toolchain, p.pin) for p in toolchain.parts)
        relations += [(_toolchain_id(toolchain), "CONTAINS", tool) for tool in tools]
    names = ("spdxElementId", "relationshipType", "relatedSpdxElement")
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
        "packages": [*_packages(bill), *_compiled(bill)],
        "relationships": [dict(zip(names, each, strict=True)) for each in relations],
        "hasExtractedLicensingInfos": [
            {"licenseId": x, "name": x.removeprefix("LicenseRef-"), "extractedText": text}
            for x in references
        ],
    }


def spdx_bytes(bill: Bill) -> bytes:
    """The document as a file."""
    return canonical_json(spdx(bill)) + b"\n"


def _id(kind: str, text: str) -> str:
    # letters, digits, dots and dashes are all that an SPDX id may have
    return f"SPDXRef-{kind}-{re.sub(r'[^A-Za-z0-9.-]', '-', text)}"


def _layer_id(digest: str) -> str:
    return _id("Layer", digest.removeprefix("sha256:"))


def _part_id(part: ImagePart) -> str:
    # the hash tells apart what the cleaned name does not
    name = f"{part.pin.name}-{part.pin.version}-{part.pin.sha256[:12]}"
    return _id("Wheel" if part.is_wheel else "Deb", name)


def _file_id(file: OwnFile) -> str:
    return _id("Patch" if file.patch else "File", f"{file.path}-{file.digest[7:19]}")


def _tree_id(tree: ImageTree) -> str:
    return _id("Tree", f"{tree.plan.source.name}-{tree.plan.name}")


def _archive_id(tree: ImageTree) -> str:
    return _id("Source", f"{tree.plan.source.name}-{tree.plan.lock.archive.sha256[:12]}")


def _toolchain_id(toolchain: Toolchain) -> str:
    return _id("Toolchain", f"{toolchain.name}-{toolchain.digest[7:19]}")


def _tool_id(toolchain: Toolchain, pin: Pin) -> str:
    return _id("Tool", f"{toolchain.name}-{pin.name}-{pin.version}-{pin.sha256[:12]}")


def _package(
    identity: str, name: str, digest: str, purl: str = "", purpose: str = "", **more: Any
) -> dict[str, Any]:
    reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl"}
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
        **({"externalRefs": [{**reference, "referenceLocator": purl}]} if purl else {}),
        **({"primaryPackagePurpose": purpose} if purpose else {}),
        **more,
    }


def _packages(bill: Bill) -> Iterator[dict[str, Any]]:
    """The image, its base, and everything in its layers."""
    version = {"versionInfo": bill.version}
    yield _package(IMAGE_ID, bill.image, bill.digest, bill.purl, "CONTAINER", **version)
    if bill.base:
        pin, digest = bill.base.pin, bill.base.pin.manifest.digest
        notes = {"versionInfo": digest, "comment": UNLISTED}
        notes["licenseComments"] = f"{_NONE}: it is not known what it holds"
        yield _package(_BASE, pin.repository, digest, bill.base.purl, "CONTAINER", **notes)
    # a foreign base may hold one layer twice
    for digest, placed in {x.layer.record.digest: x for x in bill.layers}.items():
        comment = f"a layer of {placed.image}; diffID {placed.layer.record.diff_id}"
        identity, title = _layer_id(digest), placed.layer.title
        yield _package(identity, title, digest, purpose="ARCHIVE", comment=comment)
    for billed in bill.parts:
        part, licence = billed.part, billed.licence
        known = "" if licence.expression else f"{licence.name or _NONE}: "
        yield _package(
            _part_id(part),
            part.pin.name,
            part.pin.sha256,
            part.purl,
            "LIBRARY",
            versionInfo=part.pin.version,
            packageFileName=part.pin.file,
            licenseDeclared=licence.expression or _NONE,
            licenseComments=f"{known}{licence.reason}",
        )
    yield from (_file_package(x) for x in (*bill.files, *bill.patches))


def _file_package(file: OwnFile) -> dict[str, Any]:
    return _package(
        _file_id(file),
        file.path.rpartition("/")[2],
        file.digest,
        purpose="SOURCE" if file.patch else "FILE",
        packageFileName=file.path,
        comment=plain(file.patch.why) if file.patch else f"lies at {file.to}",
    )


def _compiled(bill: Bill) -> list[dict[str, Any]]:
    """Compiled trees, and what they were compiled from and in."""
    packages, archives = [], []
    for billed in bill.trees:
        tree, licence, source = billed.tree, billed.licence, billed.tree.plan.source
        packages.append(
            _package(
                _tree_id(tree),
                source.name,
                tree.layer.record.digest,
                tree.purl,
                "APPLICATION",
                versionInfo=source.upstream.commit,
                licenseDeclared=licence.expression or _NONE,
                licenseComments=f"{licence.name or licence.expression or _NONE}: {licence.reason}",
                comment=f"compiled as {tree.plan.name} in {tree.made.toolchain}",
            )
        )
        pin = tree.plan.lock.archive
        archives.append(
            _package(
                _archive_id(tree),
                pin.name,
                pin.sha256,
                tree.archive_purl,
                "SOURCE",
                versionInfo=pin.version or source.upstream.commit,
                packageFileName=pin.file,
                comment=f"{BUILD_TIME}; its files are {tree.plan.lock.tree}",
            )
        )
    packages += archives
    for x in bill.toolchains:
        notes = {"versionInfo": x.digest, "comment": BUILD_TIME}
        packages.append(_package(_toolchain_id(x), x.name, x.digest, x.purl, **notes))
    for x in bill.toolchains:
        for p in x.parts:
            notes = {"versionInfo": p.pin.version, "comment": BUILD_TIME}
            packages.append(_package(_tool_id(x, p.pin), p.pin.name, p.pin.sha256, p.purl, **notes))
    packages += [_file_package(x) for x in bill.build_files]
    # two builds of one source have one archive
    return list({x["SPDXID"]: x for x in packages}.values())
