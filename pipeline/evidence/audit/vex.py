"""Findings as VEX: CycloneDX 1.6 and OpenVEX 0.2, both about the same images.

https://cyclonedx.org/capabilities/vex/ and https://github.com/openvex/spec
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from pipeline import __version__
from pipeline.artifacts.attest.predicates import KnownVulnerability
from pipeline.artifacts.attest.statement import stamp
from pipeline.core.model import canonical_json

# chosen once, for ids that follow from what a document says
_NAMESPACE = uuid.UUID("2b6f7f0a-0f0e-5e51-9f6b-7c4b5a1d8e20")
_OPENVEX = "https://openvex.dev/ns/v0.2.0"
_TOOL = {"type": "application", "name": "sm120-pipeline", "version": __version__}
# CycloneDX's names for OpenVEX's reasons
_JUSTIFIED = {
    "component_not_present": "code_not_present",
    "vulnerable_code_not_present": "code_not_present",
    "vulnerable_code_not_in_execute_path": "code_not_reachable",
    "vulnerable_code_cannot_be_controlled_by_adversary": "protected_at_runtime",
    "inline_mitigations_already_exist": "protected_by_mitigating_control",
}


@dataclass(frozen=True)
class VexSubject:
    """An image, how its bill is named, and what was found in it."""

    purl: str
    serial: str  # of its bill, such as urn:uuid:…; empty where it has none
    refs: dict[str, str]  # from the package URL of a component to its name in the bill
    findings: Sequence[KnownVulnerability]


def cyclonedx_vex(subjects: Sequence[VexSubject], now: datetime) -> dict[str, Any]:
    """The document; it names components in the images' own bills, by their serial numbers."""
    vulnerabilities = []
    for subject in subjects:
        for each in subject.findings:
            ref = quote(subject.refs.get(each.purl) or each.purl, safe="")
            place = f"urn:cdx:{subject.serial.removeprefix('urn:uuid:')}/1#{ref}"
            analysis: dict[str, Any] = {"state": "in_triage"}
            if each.accepted and not each.is_open(now.date()):
                analysis = {"state": "exploitable", "response": ["will_not_fix"]}
                if each.accepted.justification:
                    reason = _JUSTIFIED[each.accepted.justification]
                    analysis = {"state": "not_affected", "justification": reason}
                analysis["detail"] = f"{each.accepted.reason} (until {each.accepted.until})"
            rating = "unknown" if each.severity == "unrated" else each.severity
            body: dict[str, Any] = {
                "id": each.id,
                "references": [
                    {"id": x, "source": {"name": x.partition("-")[0]}} for x in each.aliases
                ],
                "ratings": [{"severity": rating}],
                "analysis": analysis,
                "affects": [
                    {
                        # without a bill to point into, the package names itself
                        "ref": place if subject.serial else each.purl,
                        "versions": [{"version": each.version, "status": "affected"}],
                    }
                ],
                "properties": [{"name": "sm120:image", "value": subject.purl}],
            }
            if each.published:
                body["published"] = each.published
            if each.fixed:
                body["recommendation"] = f"Take {' or '.join(each.fixed)}."
            vulnerabilities.append(body)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": stamp(now), "tools": {"components": [_TOOL]}},
        "vulnerabilities": vulnerabilities,
    }
    serial = uuid.uuid5(_NAMESPACE, canonical_json(document).decode())
    return {**document, "serialNumber": f"urn:uuid:{serial}"}


def openvex(subjects: Sequence[VexSubject], now: datetime) -> dict[str, Any]:
    """The document: a statement for each vulnerability of each image."""
    statements = []
    for subject in subjects:
        for each in subject.findings:
            product = {"@id": subject.purl, "subcomponents": [{"@id": each.purl}]}
            body: dict[str, Any] = {
                "vulnerability": {"name": each.id, "aliases": each.aliases},
                "products": [product],
                "status": "under_investigation",
            }
            if each.accepted and not each.is_open(now.date()):
                text = f"{each.accepted.reason} (until {each.accepted.until})"
                body |= {"status": "affected", "action_statement": text}
                if each.accepted.justification:
                    body |= {"status": "not_affected", "impact_statement": text}
                    body["justification"] = each.accepted.justification
                    del body["action_statement"]
            elif each.fixed:
                # affected needs an action, and a fix is one
                action = f"Take {each.package} {' or '.join(each.fixed)}."
                body |= {"status": "affected", "action_statement": action}
            statements.append(body)
    document = {
        "@context": _OPENVEX,
        "author": "sm120-pipeline",
        "timestamp": stamp(now),
        "version": 1,
        "tooling": f"sm120-pipeline {__version__}",
        "statements": statements,
    }
    identity = uuid.uuid5(_NAMESPACE, canonical_json(document).decode())
    return {**document, "@id": f"urn:uuid:{identity}"}
