"""Packages of a bill against advisories: what is found, merged, accepted and written as VEX."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.artifacts.attest.names import parse_purl
from pipeline.artifacts.attest.predicates import KnownVulnerability
from pipeline.core.errors import RecordInvalid
from pipeline.evidence.audit.database import read_database
from pipeline.evidence.audit.match import Matched, match_packages, parse_held
from pipeline.evidence.audit.packages import BilledPackage, packages_of
from pipeline.evidence.audit.vex import VexSubject, cyclonedx_vex, openvex
from pipeline.images.spec.image import AcceptedAdvisory
from tests.unit.audit.advisory_files import NOW, affected, record, write_records

WHEEL = "pkg:pypi/thing@1.5?file_name=thing-1.5-py3-none-any.whl"
DEB = "pkg:deb/debian/libthing1@1.2-3%2Bb1?arch=amd64&distro=bookworm"


def bill(*components: dict[str, Any], version: str = "1.6", **more: Any) -> dict[str, Any]:
    return {"bomFormat": "CycloneDX", "specVersion": version, "components": [*components], **more}


def component(purl: str, **more: Any) -> dict[str, Any]:
    return {"type": "library", "purl": purl, "bom-ref": purl, **more}


def matched(folder: Path, packages: list[BilledPackage], *accepted: AcceptedAdvisory) -> Matched:
    wanted = [(p.ecosystem, p.name) for p in packages]
    return match_packages(packages, read_database(folder, wanted, NOW), accepted)


def accept(identity: str = "TEST-1", **more: Any) -> AcceptedAdvisory:
    given = {"id": identity, "reason": "not reachable by us", "until": "2026-12-31", **more}
    return AcceptedAdvisory.model_validate(given)


def test_a_bill_gives_packages_as_advisories_name_them() -> None:
    source = {"properties": [{"name": "sm120:source", "value": "thing-src"}]}
    inside = {"type": "library", "purl": "pkg:cargo/serde@1.0.9", "name": "serde"}
    found = packages_of(
        bill(
            component(WHEEL.replace("thing@", "Big_Thing@"), components=[inside]),
            component(DEB, **source),
            component("pkg:pypi/compiler@1.0", scope="excluded"),
            component("pkg:generic/llama@abc"),
            component("pkg:npm/%40scope/name@1.0.0"),
            {"type": "file", "name": "ours.py"},
        ),
        "it",
    )
    assert [(x.ecosystem, x.name, x.version) for x in found] == [
        ("PyPI", "big-thing", "1.5"),
        ("crates.io", "serde", "1.0.9"),
        # a rebuild of the same source has its version
        ("Debian", "thing-src", "1.2-3"),
        ("", "llama", "abc"),
        ("npm", "@scope/name", "1.0.0"),
    ]
    assert [x.title for x in found[1:3]] == ["serde 1.0.9 in Big_Thing", "libthing1 1.2-3"]
    assert found[2].release == "12"


@pytest.mark.parametrize("version", ["1.4", "1.5", "1.6", "1.7"])
def test_bills_of_these_versions_are_read(version: str) -> None:
    assert len(packages_of(bill(component(WHEEL), version=version), "it")) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (bill(version="1.8"), "is no bill in CycloneDX"),
        ({"spdxVersion": "SPDX-2.3"}, "is no bill in CycloneDX"),
        (bill() | {"components": {}}, "no list of objects"),
        (bill() | {"components": ["x"]}, "no list of objects"),
        (bill(component(WHEEL, components=["x"])), "is no JSON object"),
    ],
)
def test_what_is_no_bill_is_refused(body: dict[str, Any], reason: str) -> None:
    body = {**body, "components": body.get("components") or body.get("components", [])}
    if body["components"] == {}:
        body["components"] = {"a": 1}
    with pytest.raises(RecordInvalid, match=reason):
        packages_of(body, "it")


@pytest.mark.parametrize(
    "purl",
    ["", "thing", "pkg:pypi/thing", "pkg:/x@1", "pkg:pypi/th\u0456ng@1", "pkg:pypi/x@" + "1" * 999],
)
def test_what_is_no_package_url_is_none(purl: str) -> None:
    assert parse_purl(purl) is None


def test_a_vulnerable_package_is_found_with_its_fix(tmp_path: Path) -> None:
    folder = write_records(tmp_path, record(database_specific={"severity": "CRITICAL"}))
    (found,) = matched(folder, packages_of(bill(component(WHEEL)), "it")).findings
    assert found == KnownVulnerability(
        id="TEST-1",
        aliases=[],
        package="thing",
        version="1.5",
        purl=WHEEL,
        via=None,
        severity="critical",
        published="2026-05-01T00:00:00Z",
        fixed=["2.0"],
        accepted=None,
    )


def test_records_of_one_vulnerability_are_one_finding(tmp_path: Path) -> None:
    folder = write_records(
        tmp_path,
        record("TEST-1", aliases=["CVE-TEST-1"], published="2026-05-09T00:00:00Z"),
        record("TEST-2", aliases=["CVE-TEST-1", "TEST-3"], severity=None),
        record("TEST-3", database_specific={"severity": "high"}),
        record("TEST-4"),
    )
    found = matched(folder, packages_of(bill(component(WHEEL)), "it")).findings
    assert [(f.id, f.aliases, f.severity) for f in found] == [
        ("CVE-TEST-1", ["TEST-1", "TEST-2", "TEST-3"], "high"),
        ("TEST-4", [], "unrated"),
    ]
    # the earliest of all says since when it is known
    assert found[0].published == "2026-05-01T00:00:00Z"


def test_debian_is_judged_by_its_release_and_its_source(tmp_path: Path) -> None:
    both = [affected("Debian:12", "thing-src", "1.2-3"), affected("Debian:13", "thing-src", "9-1")]
    folder = write_records(tmp_path, record(affected=both))
    source = {"properties": [{"name": "sm120:source", "value": "thing-src"}]}
    fixed = packages_of(bill(component(DEB, **source)), "it")
    assert matched(folder, fixed) == Matched([], [], 0)
    newer = packages_of(bill(component(DEB.replace("bookworm", "trixie"), **source)), "it")
    assert [f.fixed for f in matched(folder, newer).findings] == [["9-1"]]
    # by its own name it is no package of theirs; without a release nobody can tell
    assert matched(folder, packages_of(bill(component(DEB)), "it")).findings == []
    lost = packages_of(bill(component(DEB.partition("&")[0], **source)), "it")
    assert matched(folder, lost) == Matched([], ["libthing1 1.2-3: TEST-1"], 0)


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    folder = write_records(tmp_path, record(affected=[affected(fixed="soon")]))
    packages = packages_of(bill(component(WHEEL), component("pkg:rpm/almalinux/zlib@1.2.11")), "it")
    assert matched(folder, packages) == Matched([], ["thing 1.5: TEST-1"], 1)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (accept(), False),
        (accept("CVE-TEST-1"), False),
        (accept(package="thing"), False),
        (accept(until="2026-06-01"), False),  # the last day counts
        (accept(until="2026-05-31"), True),
        (accept(package="other"), True),
        (accept("TEST-9"), True),
    ],
)
def test_an_advisory_is_accepted_with_a_reason_until_a_day(
    given: AcceptedAdvisory, state: bool, tmp_path: Path
) -> None:
    folder = write_records(tmp_path, record(aliases=["CVE-TEST-1"]))
    (found,) = matched(folder, packages_of(bill(component(WHEEL)), "it"), given).findings
    assert found.is_open(NOW.date()) is state


@pytest.mark.parametrize(
    "wrong",
    [{"reason": "no"}, {"until": "soon"}, {"id": "../x"}, {"justification": "because"}, {"x": 1}],
)
def test_an_acceptance_without_a_good_reason_or_end_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        accept(**wrong)


@pytest.mark.parametrize(
    ("asked", "held"),
    [
        ("thing<2", True),
        ("Thing < 1.6", True),
        ("thing<=1.5", True),
        ("thing==1.5", True),
        ("pypi:thing<2", True),
        ("thing<1.5", False),
        ("deb:thing<2", False),
        ("other<2", False),
    ],
)
def test_who_holds_a_package_below_a_version(asked: str, held: bool) -> None:
    (package,) = packages_of(bill(component(WHEEL)), "it")
    assert parse_held(asked).accepts(package) is held


@pytest.mark.parametrize(
    "asked", ["", "thing", "thing>2", "thing<", "thing<!!", "pypi:thing<1.0~1"]
)
def test_a_question_that_is_none_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_held(asked)


def test_a_deb_is_held_by_its_own_name_and_its_sources() -> None:
    source = {"properties": [{"name": "sm120:source", "value": "thing-src"}]}
    (package,) = packages_of(bill(component(DEB, **source)), "it")
    assert [parse_held(f"{name}<1.2-4").accepts(package) for name in ("libthing1", "thing-src")]
    assert not parse_held("libthing1<1.2-3").accepts(package)


def finding(**changes: Any) -> KnownVulnerability:
    body = {
        "id": "TEST-1",
        "aliases": ["CVE-TEST-1"],
        "package": "thing",
        "version": "1.5",
        "purl": WHEEL,
        "via": None,
        "severity": "unrated",
        "published": None,
        "fixed": [],
        "accepted": None,
        **changes,
    }
    return KnownVulnerability.model_validate(body)


RISK = {"reason": "not reachable by us", "until": "2026-12-31"}
GOOD_REASON = {**RISK, "justification": "vulnerable_code_not_in_execute_path"}


@pytest.mark.parametrize(
    ("changes", "cyclonedx", "status"),
    [
        ({}, {"state": "in_triage"}, "under_investigation"),
        ({"fixed": ["2.0"]}, {"state": "in_triage"}, "affected"),
        (
            {"accepted": RISK},
            {
                "state": "exploitable",
                "response": ["will_not_fix"],
                "detail": "not reachable by us (until 2026-12-31)",
            },
            "affected",
        ),
        (
            {"accepted": GOOD_REASON},
            {
                "state": "not_affected",
                "justification": "code_not_reachable",
                "detail": "not reachable by us (until 2026-12-31)",
            },
            "not_affected",
        ),
        # expired: nobody vouches for it any more
        (
            {"accepted": {**GOOD_REASON, "until": "2026-01-01"}},
            {"state": "in_triage"},
            "under_investigation",
        ),
    ],
)
def test_a_finding_is_written_as_vex(
    changes: dict[str, Any], cyclonedx: dict[str, Any], status: str
) -> None:
    subject = VexSubject("pkg:oci/it@sha256", "urn:uuid:1-2", {WHEEL: WHEEL}, [finding(**changes)])
    (written,) = cyclonedx_vex([subject], NOW)["vulnerabilities"]
    assert written["analysis"] == cyclonedx
    assert written["affects"][0]["ref"].startswith("urn:cdx:1-2/1#pkg%3Apypi%2Fthing")
    assert written["ratings"] == [{"severity": "unknown"}]
    (stated,) = openvex([subject], NOW)["statements"]
    assert stated["status"] == status
    # OpenVEX: what is affected needs an action, what is not affected a reason
    assert ("action_statement" in stated) is (status == "affected")
    assert ("justification" in stated) is (status == "not_affected")
    assert stated["products"] == [{"@id": "pkg:oci/it@sha256", "subcomponents": [{"@id": WHEEL}]}]


def test_equal_findings_give_equal_documents() -> None:
    subject = VexSubject("pkg:oci/it@sha256", "", {}, [finding()])
    assert cyclonedx_vex([subject], NOW) == cyclonedx_vex([subject], NOW)
    later = datetime(2026, 6, 2, tzinfo=UTC)
    assert openvex([subject], NOW)["@id"] != openvex([subject], later)["@id"]
    assert cyclonedx_vex([subject], NOW)["vulnerabilities"][0]["affects"][0]["ref"] == WHEEL
    assert date(2026, 6, 1) == NOW.date()


def test_vex_and_the_bill_of_a_run_are_valid_by_cyclonedxs_own_schema() -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed.")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    given = [
        finding(),
        finding(accepted=RISK, severity="high", published="2026-05-01T00:00:00Z", fixed=["2.0"]),
        finding(accepted=GOOD_REASON, severity="critical"),
    ]
    serial = "urn:uuid:6f0c9a3e-5a0d-5d0f-8a43-0f5f0c5d3b1e"
    document = cyclonedx_vex([VexSubject("pkg:oci/it@sha256", serial, {}, given)], NOW)
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(document)) is None
    broken = json.loads(json.dumps(document).replace("in_triage", "fine"))
    assert validator.validate_str(json.dumps(broken)) is not None
