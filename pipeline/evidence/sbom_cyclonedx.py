"""A bill of materials as CycloneDX 1.6 JSON, the same bytes for the same image."""

from __future__ import annotations

import base64
import uuid
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.attest.names import BUILD_TIME, UNLISTED
from pipeline.attest.strict import plain
from pipeline.evidence.bill import Bill, BilledPart, BilledTree
from pipeline.evidence.compiled import ImageTree
from pipeline.evidence.inventory import BaseImage, OwnFile
from pipeline.evidence.licence import Licence
from pipeline.model import canonical_json

# chosen once, for serial numbers that follow from the image's digest
_NAMESPACE = uuid.UUID("6f0c9a3e-5a0d-5d0f-8a43-0f5f0c5d3b1e")


def cyclonedx(bill: Bill) -> dict[str, Any]:
    """The document. It holds no time, so that an image has one bill."""
    parts = [_part(x, bill.root) for x in bill.parts]
    files = [_own_file(x) for x in bill.files]
    base = [_base(bill.base)] if bill.base else []
    trees = [_tree(x, bill.root) for x in bill.trees]
    build_time = _build_time(bill)
    refs = sorted(x["bom-ref"] for x in [*base, *parts, *files, *trees])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, bill.digest)}",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [
                    {"type": "application", "name": "sm120-pipeline", "version": __version__}
                ]
            },
            "component": _image(bill),
        },
        "components": [*base, *parts, *files, *trees, *build_time],
        "dependencies": [{"ref": bill.purl, "dependsOn": refs}, *_made_with(bill)],
        "compositions": _compositions(bill),
    }


def _compositions(bill: Bill) -> list[dict[str, Any]]:
    """How complete the list is: whole, unless a part holds what nobody listed."""
    # of a foreign base the contents, of a compiled tree what its source vendors
    unknown = [*([bill.base.purl] if bill.base else []), *(x.tree.purl for x in bill.trees)]
    if not unknown:
        # claimed because the image was assembled from nothing else
        return [{"aggregate": "complete", "assemblies": [bill.purl]}]
    return [
        {"aggregate": "incomplete", "assemblies": [bill.purl]},
        {"aggregate": "unknown", "assemblies": unknown},
    ]


def cyclonedx_bytes(bill: Bill) -> bytes:
    """The document as a file."""
    return canonical_json(cyclonedx(bill)) + b"\n"


def _image(bill: Bill) -> dict[str, Any]:
    layers = [
        {"name": f"sm120:layer:{x.layer.record.digest}", "value": f"{x.image}: {x.layer.title}"}
        for x in bill.layers
    ]
    return {
        "type": "container",
        "bom-ref": bill.purl,
        "name": bill.image,
        "version": bill.version,
        "purl": bill.purl,
        "hashes": [_hash(bill.digest)],
        "properties": [{"name": "sm120:platform", "value": bill.platform}, *layers],
    }


def _hash(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest.removeprefix("sha256:")}


def _base(base: BaseImage) -> dict[str, Any]:
    pin = base.pin
    layers = [{"name": "sm120:layer", "value": layer.digest} for layer in pin.layers]
    index = [{"name": "sm120:index", "value": pin.index.digest}] if pin.index else []
    return {
        "type": "container",
        "bom-ref": base.purl,
        "name": pin.repository,
        "version": pin.manifest.digest,
        "purl": base.purl,
        "hashes": [_hash(pin.manifest.digest)],
        "properties": [
            {"name": "sm120:contents", "value": UNLISTED},
            {"name": "sm120:licence:source", "value": "NOASSERTION: it is not known what it holds"},
            *index,
            *layers,
        ],
    }


def _part(billed: BilledPart, root: Path) -> dict[str, Any]:
    part = billed.part
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": part.purl,
        "name": part.pin.name,
        "version": part.pin.version,
        "purl": part.purl,
        "hashes": [_hash(part.pin.sha256)],
        "properties": [
            {"name": "sm120:file", "value": part.pin.file},
            {"name": "sm120:layer", "value": part.layer.record.digest},
            {"name": "sm120:layer:title", "value": part.layer.title},
            {"name": "sm120:licence:source", "value": _source(billed.licence)},
        ],
    }
    if licences := _licences(billed.licence):
        component["licenses"] = licences
    if billed.patches:
        component["modified"] = True
        component["pedigree"] = {"patches": [_patch(p, root) for p in billed.patches]}
    return component


def _source(licence: Licence) -> str:
    known = licence.expression or licence.name
    return licence.reason if known else f"NOASSERTION: {licence.reason}"


def _licences(licence: Licence) -> list[dict[str, Any]]:
    if licence.expression:
        return [{"expression": licence.expression}]
    return [{"license": {"name": licence.name}}] if licence.name else []


def _patch(file: OwnFile, root: Path) -> dict[str, Any]:
    assert file.patch is not None
    text = base64.b64encode((root / file.path).read_bytes()).decode()
    return {
        "type": "unofficial",
        "diff": {"text": {"contentType": "text/x-diff", "encoding": "base64", "content": text}},
        "resolves": [
            {
                "type": "defect",
                "id": file.path,
                "name": file.digest,
                "description": plain(file.patch.why),
                "references": list(file.patch.upstream),
            }
        ],
    }


def _own_file(file: OwnFile) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": file.urn,
        "name": file.to,
        "hashes": [_hash(file.digest)],
        "properties": [
            {"name": "sm120:file", "value": file.path},
            {"name": "sm120:image", "value": file.image},
        ],
    }


def _tree(billed: BilledTree, root: Path) -> dict[str, Any]:
    tree, source = billed.tree, billed.tree.plan.source
    component: dict[str, Any] = {
        "type": "application",
        "bom-ref": tree.purl,
        "name": source.name,
        "version": source.upstream.commit,
        "purl": tree.purl,
        "hashes": [_hash(tree.layer.record.digest)],
        "properties": [
            {"name": "sm120:build", "value": tree.plan.name},
            {"name": "sm120:layer", "value": tree.layer.record.digest},
            {"name": "sm120:layer:title", "value": tree.layer.title},
            {"name": "sm120:licence:source", "value": _source(billed.licence)},
            {"name": "sm120:toolchain", "value": tree.made.toolchain},
            {"name": "sm120:upstream", "value": plain(source.upstream.repository)},
        ],
        "pedigree": {"commits": [{"uid": source.upstream.commit}]},
    }
    if licences := _licences(billed.licence):
        component["licenses"] = licences
    if billed.patches:
        component["modified"] = True
        component["pedigree"]["patches"] = [_patch(p, root) for p in billed.patches]
    return component


def _build_time(bill: Bill) -> list[dict[str, Any]]:
    """What trees were compiled from and in; CycloneDX calls excluded what is not shipped."""
    archives = {x.tree.plan.source.name: x.tree for x in bill.trees}
    components = [_archive(tree) for tree in archives.values()]
    components += [
        _excluded("container", x.purl, x.name, x.digest, x.digest, []) for x in bill.toolchains
    ]
    for x in bill.toolchains:
        notes = [{"name": "sm120:toolchain", "value": x.name}]
        components += [
            {
                **_excluded("library", p.purl, p.pin.name, p.pin.version, p.pin.sha256, notes),
                # the image may hold the same package for itself
                "bom-ref": p.urn,
            }
            for p in x.parts
        ]
    components += [{**_own_file(x), "name": x.path, "scope": "excluded"} for x in bill.build_files]
    by_ref = {x["bom-ref"]: x for x in components}
    return list(by_ref.values())


def _archive(tree: ImageTree) -> dict[str, Any]:
    pin, lock = tree.plan.lock.archive, tree.plan.lock
    notes = [
        {"name": "sm120:file", "value": pin.file},
        {"name": "sm120:files:digest", "value": lock.tree},
    ]
    version = pin.version or tree.plan.source.upstream.commit
    return _excluded("library", tree.archive_purl, pin.name, version, pin.sha256, notes)


def _excluded(
    kind: str, purl: str, name: str, version: str, digest: str, notes: list[dict[str, str]]
) -> dict[str, Any]:
    return {
        "type": kind,
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "scope": "excluded",
        "hashes": [_hash(digest)],
        "properties": [{"name": "sm120:use", "value": BUILD_TIME}, *notes],
    }


def _made_with(bill: Bill) -> list[dict[str, Any]]:
    """From each tree to its source and its toolchain, and from that to its packages."""
    purls = {x.digest: x.purl for x in bill.toolchains}
    trees = [
        {
            "ref": x.tree.purl,
            "dependsOn": sorted((x.tree.archive_purl, purls[x.tree.made.toolchain])),
        }
        for x in bill.trees
    ]
    toolchains = [
        {"ref": x.purl, "dependsOn": sorted({p.urn for p in x.parts})} for x in bill.toolchains
    ]
    return [*trees, *toolchains]
