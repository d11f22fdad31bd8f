"""Which versions an advisory is about, by PEP 440's order, Debian's and SemVer's."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.evidence.audit.advisories import Affected, is_affected, order_key, read_osv
from pipeline.images.lock.debian import version_key

ADVISORIES = Path(__file__).resolve().parents[2] / "fixtures" / "advisories"


def about(ecosystem: str, *events: str, versions: tuple[str, ...] = ()) -> Affected:
    """One range, written as `introduced 0`, `fixed 2.0`."""
    pairs = [each.split() for each in events]
    ranges = (tuple((what, at) for what, at in pairs),) if pairs else ()
    return Affected(ecosystem, "", "thing", frozenset(versions), ranges)


def real_records() -> list[dict[str, Any]]:
    with zipfile.ZipFile(ADVISORIES / "osv" / "all.zip") as archive:
        return [json.loads(archive.read(name)) for name in archive.namelist()]


@pytest.mark.parametrize(
    ("ecosystem", "events", "version", "answer"),
    [
        ("PyPI", ["introduced 0", "fixed 2.0"], "1.10", True),
        ("PyPI", ["introduced 0", "fixed 2.0"], "2.0", False),
        ("PyPI", ["introduced 0", "fixed 1.10"], "1.9", True),
        ("PyPI", ["introduced 0", "fixed 2.0"], "2.0rc1", True),
        ("PyPI", ["introduced 0", "fixed 2.0"], "2.0.dev3", True),
        ("PyPI", ["introduced 0", "fixed 2.0"], "2.0.post1", False),
        ("PyPI", ["introduced 0", "fixed 2.0"], "1!0.1", False),
        ("PyPI", ["introduced 0", "fixed 2.8.0"], "2.8.0+cu130", False),
        ("PyPI", ["introduced 0", "last_affected 2.7.1"], "2.7.1+cu128", True),
        ("PyPI", ["introduced 0", "last_affected 2.7.1"], "2.7.2", False),
        ("PyPI", ["introduced 0", "last_affected 2.7.1+cu126"], "2.7.1+cu128", False),
        ("PyPI", ["introduced 1.5", "fixed 2.0"], "1.4.9", False),
        ("PyPI", ["introduced 1.5", "fixed 2.0"], "1.5", True),
        # in any order, and in branches
        ("PyPI", ["fixed 2.0", "introduced 1.5"], "1.7", True),
        ("PyPI", ["introduced 0", "fixed 3.0.1", "introduced 3.1", "fixed 3.1.4"], "3.0.5", False),
        ("PyPI", ["introduced 0", "fixed 3.0.1", "introduced 3.1", "fixed 3.1.4"], "3.1.3", True),
        ("PyPI", ["introduced 0", "fixed 3.0.1", "introduced 3.1", "fixed 3.1.4"], "3.1.4", False),
        ("PyPI", ["introduced 0", "limit 2.0"], "1.9", True),
        ("PyPI", ["introduced 0", "limit 2.0"], "2.0", False),
        ("PyPI", ["introduced 0"], "99", True),
        ("Debian", ["introduced 0", "fixed 3.0.11-1~deb12u2"], "3.0.11-1~deb12u1", True),
        ("Debian", ["introduced 0", "fixed 3.0.11-1~deb12u2"], "3.0.11-1", False),
        ("Debian", ["introduced 0", "fixed 3.0.11-1"], "3.0.11-1~deb12u2", True),
        ("Debian", ["introduced 0", "fixed 1:2.5.1-4"], "2:0.1-1", False),
        ("Debian", ["introduced 0", "fixed 1:2.5.1-4"], "9.9-9", True),
        ("Debian", ["introduced 0", "fixed 2.36-9+deb12u10"], "2.36-9+deb12u9", True),
        ("crates.io", ["introduced 0.0.0-0", "fixed 1.0.10"], "1.0.9", True),
        ("crates.io", ["introduced 0", "fixed 1.0.0"], "1.0.0-alpha.2", True),
        ("crates.io", ["introduced 0", "fixed 1.0.0-alpha.10"], "1.0.0-alpha.9", True),
        ("crates.io", ["introduced 0", "fixed 1.0.0-alpha.10"], "1.0.0-alpha.beta", False),
        ("npm", ["introduced 0", "fixed 4.17.21"], "4.17.21+build.7", False),
        # what cannot be compared is neither
        ("PyPI", ["introduced 0", "fixed latest"], "1.0", None),
        ("Debian", ["introduced 0", "fixed 1.0"], "not a version!", None),
        ("AlmaLinux", ["introduced 0", "fixed 1.0"], "0.9", None),
        ("PyPI", [], "1.0", None),
    ],
)
def test_a_range_is_evaluated_by_the_order_of_its_ecosystem(
    ecosystem: str, events: list[str], version: str, answer: bool | None
) -> None:
    assert is_affected(about(ecosystem, *events), version) is answer


@pytest.mark.parametrize(
    ("listed", "version", "answer"),
    [
        ("1.0", "1.0", True),
        ("1.0", "1.0.0", True),
        ("1.0-RC1", "1.0rc1", True),
        ("2004d", "2004", False),
        ("2.7.1", "2.7.1+cu128", True),
        ("2.7.1", "2.7.2", False),
    ],
)
def test_listed_versions_count_also_where_no_range_does(
    listed: str, version: str, answer: bool
) -> None:
    assert is_affected(about("PyPI", versions=(listed,)), version) is answer


def test_every_real_record_finds_the_version_before_its_fix_and_not_the_fix() -> None:
    records = real_records()
    assert len(records) >= 500
    checked = 0
    for record in records:
        for each in read_osv(record, record["id"]).affected:
            for fixed in each.fixed:
                before = f"{fixed}~" if each.ecosystem == "Debian" else f"{fixed}.dev0"
                after = f"{fixed}+deb12u1" if each.ecosystem == "Debian" else f"{fixed}.post1"
                assert is_affected(each, before) is True, (record["id"], before)
                assert is_affected(each, fixed) is False, (record["id"], fixed)
                assert is_affected(each, after) is False, (record["id"], after)
                checked += 1
    assert checked >= 750


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="This machine has no dpkg to ask.")
def test_dpkg_sorts_the_versions_of_the_real_records_as_we_do() -> None:
    known = {
        x
        for record in real_records()
        for each in read_osv(record, "it").affected
        if each.ecosystem == "Debian"
        for fixed in each.fixed
        for x in (fixed, f"{fixed}~")
    }
    ordered = sorted(known, key=version_key)
    assert len(ordered) > 400
    lines = [
        f"dpkg --compare-versions '{a}' lt '{b}' || echo '{a}' '{b}'" for a, b in pairwise(ordered)
    ]
    # equal to dpkg are only spellings of one version, such as 1.0 and 1.00
    done = subprocess.run(
        ["sh"], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    wrong = [x.split() for x in done.stdout.splitlines()]
    assert [x for x in wrong if version_key(x[0]) != version_key(x[1])] == []


@pytest.mark.parametrize(
    ("vector", "severity"),
    [
        # scores of the specification's own examples: first.org/cvss/v3.1/examples
        ("CVSS:3.0/AV:N/AC:L/PR:L/UI:N/S:C/C:L/I:L/A:N", "medium"),  # 6.4
        ("CVSS:3.0/AV:N/AC:H/PR:N/UI:R/S:U/C:L/I:N/A:N", "low"),  # 3.1
        ("CVSS:3.0/AV:N/AC:L/PR:L/UI:N/S:C/C:H/I:H/A:H", "critical"),  # 9.9
        ("CVSS:3.0/AV:L/AC:L/PR:N/UI:R/S:U/C:H/I:H/A:H", "high"),  # 7.8
        ("CVSS:3.0/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:N/A:N", "high"),  # 7.5
        ("CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:N/I:N/A:N", "none"),
        ("CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:C/C:H/I:H/A:H", "critical"),  # 10.0
        ("CVSS:3.1/AV:L/AC:L/PR:N/UI:N/S:U/C:L/I:L/A:N", "medium"),  # 5.1
    ],
)
def test_a_vector_is_rated_by_its_base_score(vector: str, severity: str) -> None:
    record = {
        "id": "TEST-1",
        "modified": "2026-01-01T00:00:00Z",
        "severity": [{"type": "CVSS_V3", "score": vector}],
    }
    assert read_osv(record, "it").severity == severity


def test_the_worst_rating_counts_and_none_is_unrated() -> None:
    record: dict[str, Any] = {"id": "TEST-1", "modified": "2026-01-01T00:00:00Z"}
    assert read_osv(record, "it").severity == "unrated"
    record["database_specific"] = {"severity": "MODERATE"}
    assert read_osv(record, "it").severity == "medium"
    vector = {"type": "CVSS_V4", "score": "CVSS:4.0/AV:N/AC:L/AT:N/PR:N/UI:N/VC:H/VI:H/VA:H"}
    record["severity"] = [vector]
    assert read_osv(record, "it").severity == "medium"
    record["affected"] = [{"ecosystem_specific": {"severity": "CRITICAL"}}]
    assert read_osv(record, "it").severity == "critical"


def test_versions_of_unknown_ecosystems_have_no_order() -> None:
    assert order_key("Maven", "1.0") is None
    assert order_key("PyPI", "2004d") is None
