"""`sm120 evidence audit` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.spec.checkout import Checkout
from tests.testbed.locked_set import make_set
from tests.testbed.oci_door import Door
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.audit.advisory_files import affected, record, write_records
from tests.unit.support import Command, tiny_spec, write_spec

# long ago, so that an audit in a hundred years finds the same; ids with TEST- are made up
OLD = ("--max-age", "36500")


@pytest.fixture
def tiny() -> TinyRegistry:
    return TinyRegistry(has_referrers=True)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    given = record(database_specific={"severity": "CRITICAL"}, aliases=["CVE-TEST-1"])
    given["affected"] = [affected(fixed="1.1")]
    return write_records(tmp_path / "advisories", given, record("TEST-2"), zipped=True)


def accept(checkout: Checkout, **more: Any) -> None:
    given = {"id": "CVE-TEST-1", "reason": "nobody reaches it", "until": "2999-01-01", **more}
    write_spec(checkout, tiny_spec(advisories=[given]))


def test_findings_are_printed_with_what_was_compared(
    checkout: Checkout, sm120: Command, database: Path
) -> None:
    ended = sm120("evidence", "audit", "tiny", "--database", database, *OLD)
    assert ended.code == 0
    rows = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert rows[2:4] == [
        "tiny linux/amd64 thing 1.0 CVE-TEST-1 critical 1.1 open",
        "tiny linux/amd64 thing 1.0 TEST-2 unrated 2.0 open",
    ]
    assert "tiny linux/amd64: 1 package compared, 1 critical, 1 unrated; by its lock" in ended.out
    assert "database: 2 advisories, the newest of 2026-05-30 00:00 UTC" in ended.out


def test_a_finding_fails_a_job_that_asks_for_it(
    checkout: Checkout, sm120: Command, database: Path
) -> None:
    asked = ("evidence", "audit", "tiny", "--database", database, *OLD, "--fail-on", "high")
    ended = sm120(*asked)
    assert (ended.code, ended.error) == (76, "KnownVulnerable")
    assert "thing 1.0 has CVE-TEST-1, critical" in ended.err
    accept(checkout)
    assert sm120(*asked).code == 0
    accept(checkout, until="2026-01-01")
    late = sm120(*asked)
    assert (late.code, "expired 2026-01-01" in late.out) == (76, True)


def test_accepting_an_advisory_changes_no_image_and_no_lock(
    built: str, checkout: Checkout, sm120: Command
) -> None:
    accept(checkout)
    assert sm120("image", "lock", "tiny", "--check").code == 0
    again = sm120("build", "tiny", "--offline", "--mirror", sm120.cwd / "mirror", "--json").json
    assert (again[0]["digest"], again[0]["cached"]) == (built, True)


def test_an_old_database_says_so(checkout: Checkout, sm120: Command, database: Path) -> None:
    ended = sm120("evidence", "audit", "tiny", "--database", database, "--max-age", "1")
    assert (ended.code, ended.error) == (74, "DatabaseOld")
    assert "its newest advisory is of 2026-05-30" in ended.err
    # the table is printed all the same
    assert "CVE-TEST-1" in ended.out


def test_a_damaged_database_is_refused(checkout: Checkout, sm120: Command, database: Path) -> None:
    (database / "TEST-9.json").write_text("{")
    ended = sm120("evidence", "audit", "tiny", "--database", database, *OLD)
    assert (ended.code, ended.error, ended.out) == (30, "DatabaseInvalid", "")


def test_json_and_vex_are_for_programs(checkout: Checkout, sm120: Command, database: Path) -> None:
    asked = ("evidence", "audit", "tiny", "--database", database, *OLD)
    (image,) = sm120(*asked, "--json").json["images"]
    assert image["audit"]["packages"] == 1
    assert [f["id"] for f in image["audit"]["findings"]] == ["CVE-TEST-1", "TEST-2"]
    vex = sm120(*asked, "--format", "cyclonedx").json
    assert [x["id"] for x in vex["vulnerabilities"]] == ["CVE-TEST-1", "TEST-2"]
    stated = sm120(*asked, "--format", "openvex").json
    assert [x["status"] for x in stated["statements"]] == ["affected", "affected"]


def test_who_holds_a_package_needs_no_database(
    built: str, checkout: Checkout, sm120: Command, tmp_path: Path
) -> None:
    rows = [{"host": "gpu1", "served": [{"status": {"digest": built}}]}]
    rows.append({"host": "gpu2", "served": [{"status": {"digest": "sha256:other"}}]})
    (tmp_path / "hosts.json").write_text(json.dumps(rows))
    asked = ("evidence", "audit", "--holds", "thing<1.1", "--hosts", tmp_path / "hosts.json")
    held = sm120(*asked)
    assert held.out.splitlines()[2].split() == ["tiny", "linux/amd64", "thing", "1.0", "gpu1"]
    assert "sha256:other: served by gpu2, and not among these images" in held.out
    assert "none of 1 image holds such a package" in sm120(*asked[:2], "--holds", "thing<1.0").out
    (tmp_path / "hosts.json").write_text("{}x")
    assert sm120(*asked).error == "RecordInvalid"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "name a database"),
        (["--holds", "thing<2", "--format", "openvex"], "need a --database"),
        (["--holds", "thing"], "is not NAME<VERSION"),
        (["--holds", "thing<2", "--attest"], "need a --database"),
    ],
)
def test_a_question_without_what_it_needs_is_a_usage_error(
    checkout: Checkout, sm120: Command, options: list[str], reason: str
) -> None:
    ended = sm120("evidence", "audit", "tiny", *options)
    assert (ended.code, reason in ended.err) == (2, True), ended.err


def test_an_audit_is_signed_kept_published_and_asked_for(
    built: str, checkout: Checkout, sm120: Command, database: Path, door: Door, tmp_path: Path
) -> None:
    sm120("evidence", "new-key", "builder")
    audit = ("evidence", "audit", "tiny", "--database", database, *OLD)
    assert sm120(*audit, "--attest").code == 0
    policy = tmp_path / "policy.yaml"
    policy.write_text("format: 1\naudit: {database_max_age_days: 36500}\n")
    at = f"{door.host_port}/team/tiny:v1"
    assert sm120("publish", "tiny", at).code == 0
    for name in ("tiny", at):
        ended = sm120("verify", name, "--policy", policy)
        assert ended.error == "PolicyRefused", ended.err
        assert "thing 1.0 has CVE-TEST-1, critical" in ended.err
        assert "audit  valid: 2 known vulnerabilities, 0 accepted" in ended.out
    # accepted with a reason, and stated again: the reason is signed with the image
    accept(checkout)
    assert sm120(*audit, "--attest").code == 0
    assert sm120("publish", "tiny", at).code == 0
    for name in ("tiny", at):
        assert sm120("verify", name, "--policy", policy).code == 0
    # by the bill that was published with it, and by what the checkout accepts
    published = sm120("evidence", "audit", at, "--database", database, *OLD).out
    assert "accepted until 2999-01-01" in published


def test_bills_of_others_are_judged_and_never_signed(
    built: str, checkout: Checkout, sm120: Command, database: Path, tmp_path: Path
) -> None:
    bill = tmp_path / "bill.json"
    bill.write_text(sm120("evidence", "sbom", "tiny").out)
    audit = ("evidence", "audit", bill, "--database", database, *OLD)
    (image,) = sm120(*audit, "--json").json["images"]
    assert image["digest"] == built
    assert image["note"] == "a file, whose signatures were not judged"
    gap = {"name": "sm120:sbom:unread", "value": "a.json: is not JSON"}
    body = json.loads(bill.read_text())
    body["components"][0]["properties"].append(gap)
    bill.write_text(json.dumps(body))
    assert "1 bill inside wheels could not be read" in sm120(*audit).out
    sm120("evidence", "new-key", "builder")
    assert sm120(*audit, "--attest").error == "UnknownImage"
    bill.write_text('{"bomFormat": "CycloneDX", "specVersion": "1.0"}')
    assert sm120(*audit).error == "RecordInvalid"


def test_the_bill_of_a_run_names_its_weights_as_a_model(
    built: str, checkout: Checkout, sm120: Command, tmp_path: Path
) -> None:
    place = make_set(tmp_path / "models", {"config.json": b"{}"}, {"model.safetensors": b"x" * 99})
    bill = sm120("evidence", "sbom", "tiny", "--weights", tmp_path / "models").json
    (model,) = [x for x in bill["components"] if x["type"] == "machine-learning-model"]
    assert model["purl"] == f"pkg:huggingface/org/tiny@{place.lock.commit}"
    pins = {pin.path: pin for pin in place.lock.files}
    hashes = {x["name"]: x.get("hashes") for x in model["components"]}
    assert hashes == {
        # git's hash of a blob is none of a file
        "config.json": None,
        "model.safetensors": [{"alg": "SHA-256", "content": pins["model.safetensors"].sha256}],
    }
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed.")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    alone = sm120("evidence", "sbom", "tiny").json
    assert alone["serialNumber"] != bill["serialNumber"]
    assert sm120("evidence", "sbom", "tiny", "--weights", "nobody/nothing").error == "LockMissing"
    asked = ("evidence", "sbom", "tiny", "--weights", tmp_path / "models", "--format", "spdx")
    assert sm120(*asked).code == 2
