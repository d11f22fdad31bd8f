"""A bill of materials against the provenance: the same packages with the same hashes, no others."""

from __future__ import annotations

from typing import Any

from pipeline.attest.names import CYCLONEDX
from pipeline.errors import RecordInvalid
from pipeline.evidence.provenance import Provenance
from pipeline.evidence.sbom_spdx import IMAGE_ID
from pipeline.verify.verdict import Node, Verdict

Package = tuple[str, str]  # package URL and sha256


def judge_bill(predicate_type: str, predicate: dict[str, Any], made: Provenance | None) -> Node:
    """Whether a bill lists exactly what went in."""
    title = "bill of materials"
    read = _cyclonedx if predicate_type == CYCLONEDX else _spdx
    try:
        listed = read(predicate)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordInvalid(f"{title}: is not in the form it says ({error!r})") from error
    for package in listed:
        if not all(isinstance(part, str) for part in package):
            raise RecordInvalid(f"{title}: lists a package by {package[0]}, which is no name")
    if made is None:
        return Node(title, Verdict.INCOMPLETE, "there is no provenance to compare it with")
    resources = (*made.bases, *made.packages("pypi"), *made.packages("deb"))
    recorded = {(x.uri, x.sha256) for x in resources}
    if extra := sorted(listed - recorded):
        return Node(title, Verdict.BROKEN, f"lists {extra[0][0]}, which did not go in like that")
    if missing := sorted(recorded - listed):
        return Node(title, Verdict.BROKEN, f"leaves out {missing[0][0]}")
    if not made.bases:
        return Node(title, words=f"{len(listed)} packages, the same as in the provenance")
    if _claims_all(predicate):
        return Node(title, Verdict.BROKEN, "calls itself complete, but a base image is in it")
    words = f"{len(listed) - 1} packages and a base image whose contents it does not list"
    return Node(title, words=f"{words}, the same as in the provenance")


def _claims_all(bill: dict[str, Any]) -> bool:
    """Whether a bill says that it lists everything; SPDX has no word for that."""
    found = bill.get("compositions", [])
    return not isinstance(found, list) or any(
        not isinstance(x, dict) or x.get("aggregate") == "complete" for x in found
    )


def _cyclonedx(bill: dict[str, Any]) -> set[Package]:
    if bill["specVersion"] != "1.6":
        raise RecordInvalid(f"bill of materials: CycloneDX {bill['specVersion']!r}, not 1.6")
    return {
        (x["purl"], {h["alg"]: h["content"] for h in x["hashes"]}["SHA-256"])
        for x in bill["components"]
        if x["type"] != "file"  # whatever else it calls itself must have gone in
    }


def _spdx(bill: dict[str, Any]) -> set[Package]:
    if bill["spdxVersion"] != "SPDX-2.3":
        raise RecordInvalid(f"bill of materials: {bill['spdxVersion']!r}, not SPDX-2.3")
    return {
        (ref["referenceLocator"], x["checksums"][0]["checksumValue"])
        for x in bill["packages"]
        if x["SPDXID"] != IMAGE_ID
        for ref in x.get("externalRefs", [])
    }
