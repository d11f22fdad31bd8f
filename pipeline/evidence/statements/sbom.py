"""A bill of materials as CycloneDX 1.6 JSON, the same bytes for the same image."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.artifacts.attest.names import BUILD_TIME, UNLISTED
from pipeline.artifacts.attest.strict import plain
from pipeline.core.model import canonical_json
from pipeline.evidence.statements.bill import Bill
from pipeline.evidence.statements.inventory import OwnFile
from pipeline.evidence.statements.licence import Licence

# chosen once, for serial numbers that follow from the image's digest
_NAMESPACE = uuid.UUID("6f0c9a3e-5a0d-5d0f-8a43-0f5f0c5d3b1e")


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
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, bill.digest)}",
        "version": 1,
        "metadata": {
            "tools": {"components": [tool]},
            "component": image | _properties([("platform", bill.platform), *layers]),
        },
        "components": [*components, *_build_time(bill)],
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
        ]
        body = _component(
            "library", part.purl, part.pin.name, part.pin.version, part.pin.sha256
        ) | _properties(notes)
        if billed.patches:
            body["pedigree"] = _patches(billed.patches, bill.root)
            body["modified"] = True
        components.append(body | _licences(billed.licence))
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
        body |= _properties(notes)
        body["pedigree"] = {"commits": [{"uid": commit}]}
        if billed_tree.patches:
            body["pedigree"] |= _patches(billed_tree.patches, bill.root)
            body["modified"] = True
        components.append(body | _licences(billed_tree.licence))
    return components


def _licence_source(licence: Licence) -> str:
    known = licence.expression or licence.name
    return licence.reason if known else f"NOASSERTION: {licence.reason}"


def _licences(licence: Licence) -> dict[str, Any]:
    if licence.expression:
        return {"licenses": [{"expression": licence.expression}]}
    return {"licenses": [{"license": {"name": licence.name}}]} if licence.name else {}


def _patches(files: Sequence[OwnFile], root: Path) -> dict[str, Any]:
    patches = []
    for file, patch in ((file, file.patch) for file in files if file.patch):
        content = base64.b64encode((root / file.path).read_bytes()).decode()
        text = {"contentType": "text/x-diff", "encoding": "base64", "content": content}
        issue: dict[str, Any] = {"type": "defect", "id": file.path, "name": file.digest}
        issue |= {"description": plain(patch.why), "references": list(patch.upstream)}
        patches.append({"type": "unofficial", "diff": {"text": text}, "resolves": [issue]})
    return {"patches": patches}


def _own_file(file: OwnFile) -> dict[str, Any]:
    body = {"type": "file", "bom-ref": file.urn, "name": file.to, "hashes": _hashes(file.digest)}
    return body | _properties([("file", file.path), ("image", file.image)])


def _build_time(bill: Bill) -> list[dict[str, Any]]:
    """Sources and toolchains of trees; CycloneDX calls excluded what is not shipped."""

    def excluded(component: dict[str, Any], *notes: tuple[str, str]) -> dict[str, Any]:
        return component | {"scope": "excluded"} | _properties([("use", BUILD_TIME), *notes])

    components = []
    for tree in (x.tree for x in bill.trees):
        pin, lock = tree.plan.lock.archive, tree.plan.lock
        version = pin.version or tree.plan.source.upstream.commit
        body = _component("library", tree.archive_purl, pin.name, version, pin.sha256)
        notes = ("file", pin.file), ("files:digest", lock.tree)
        components.append(excluded(body, *notes))
    for x in bill.toolchains:
        components.append(excluded(_component("container", x.purl, x.name, x.digest, x.digest)))
    for x in bill.toolchains:
        for p in x.parts:
            body = _component("library", p.purl, p.pin.name, p.pin.version, p.pin.sha256)
            # the image may hold the same package for itself
            components.append(excluded(body, ("toolchain", x.name)) | {"bom-ref": p.urn})
    components += [_own_file(x) | {"name": x.path, "scope": "excluded"} for x in bill.build_files]
    # two builds of one source have one archive
    return list({x["bom-ref"]: x for x in components}.values())
