"""A policy asks for more than that nothing is wrong."""

from __future__ import annotations

import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import Envelope, countersigned, enclose
from pipeline.artifacts.attest.keys import LocalSigner, PrivateKey, key_id
from pipeline.artifacts.attest.names import AUDIT
from pipeline.artifacts.attest.statement import make_statement
from pipeline.core.errors import TrustInvalid
from pipeline.evidence.verify.chain import Policy, judge_policy, read_policy
from pipeline.evidence.verify.evidence import read_item
from pipeline.evidence.verify.verdict import Node, Verdict
from tests.unit.verify.world import NOW, WHEN, World, rebuild_statement, trust_in, trusted


def judged(world: World, days: int = 0, **asked: Any) -> Node:
    policy = Policy.model_validate(asked)
    return judge_policy(policy, world.walk(), NOW + timedelta(days=days))


def test_what_is_there_satisfies(world: World) -> None:
    asked: dict[str, Any] = {
        "require": ["provenance", "cyclonedx", "rebuild"],
        "keys": [key_id(world.key.public_key())],
        "max_age_days": 30,
        "gates": {"smem": "passed", "patches": "accepted"},
    }
    assert judged(world, **asked).verdict is Verdict.VALID


def test_a_policy_says_what_it_was_satisfied_by(world: World) -> None:
    asked = Policy.model_validate({"require": ["rebuild"], "gates": {"smem": "passed"}})
    nodes = judge_policy(asked, world.walk(), NOW).children
    assert [(n.title, n.message) for n in nodes] == [
        ("rebuild is there", ""),
        ("gate smem", "passed on sm_120"),
    ]


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0, Verdict.VALID), (1, Verdict.BROKEN), (-1, Verdict.VALID)]
)
def test_evidence_may_be_as_old_as_the_policy_says(
    world: World, seconds: int, verdict: Verdict
) -> None:
    made = datetime(2026, 5, 31, 8, tzinfo=UTC)
    now = made + timedelta(days=30, seconds=seconds)
    node = judge_policy(Policy(max_age_days=30), world.walk(), now)
    assert len(node.children) == len(world.envelopes())
    assert {n.verdict for n in node.children} == {verdict}
    assert node.children[0].title == "age of provenance"


def test_an_empty_policy_asks_for_nothing(world: World) -> None:
    assert judged(world).verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"require": ["host-facts"]}, "host-facts"),
        ({"require": ["provenance"], "keys": []}, "is required, but missing"),
        ({"require": ["provenance"], "keys": ["sha256:" + "0" * 64]}, "is required"),
        ({"require": ["provenance"], "signatures": 2}, "enough signatures"),
        ({"gates": {"arch": "accepted"}}, "has no result that counts"),
        ({"gates": {"smem": "passed"}, "signatures": 2}, "has no result that counts"),
    ],
)
def test_what_is_missing_is_refused(world: World, asked: dict[str, Any], message: str) -> None:
    node = judged(world, **asked)
    assert node.verdict is Verdict.BROKEN
    assert message in f"{node.culprit().title} {node.culprit().message}"


def test_old_evidence_is_refused(world: World) -> None:
    node = judged(world, days=40, max_age_days=30)
    assert node.verdict is Verdict.BROKEN
    assert "more than 30 days ago" in node.culprit().message


def test_evidence_without_a_time_has_no_age(world: World) -> None:
    def change(body: dict[str, Any]) -> None:
        del body["predicate"]["sm120_recorded"]

    walked = world.walk({**world.envelopes(), "rebuild": world.lie("rebuild", change)})
    node = judge_policy(Policy(max_age_days=30), walked, NOW)
    assert "has no time" in node.culprit().message


def accepted(body: dict[str, Any]) -> None:
    body["predicate"] |= {"result": "WARNED", "sm120_verdict": "accepted", "warnedTests": ["x"]}


@pytest.mark.parametrize(("least", "verdict"), [("passed", "BROKEN"), ("accepted", "VALID")])
def test_accepted_is_less_than_passed(world: World, least: str, verdict: str) -> None:
    warned = world.lie("gate-smem-sm_120", accepted)
    walked = world.walk({**world.envelopes(), "gate-smem-sm_120": warned})
    node = judge_policy(Policy.model_validate({"gates": {"smem": least}}), walked, NOW)
    assert node.verdict is Verdict[verdict]


def test_a_result_that_cannot_be_read_counts_for_nothing(world: World) -> None:
    broken = world.lie("gate-smem-sm_120", lambda b: b["predicate"].update(result="?"))
    walked = world.walk({**world.envelopes(), "gate-smem-sm_120": broken})
    node = judge_policy(Policy(gates={"smem": "accepted"}), walked, NOW)
    assert node.verdict is Verdict.BROKEN


def test_two_signatures_are_counted(world: World) -> None:
    both = countersigned(world.signed("provenance"), LocalSigner(world.other_key))
    trust = trust_in(trusted(world.key), trusted(world.other_key, "second"))
    walked = world.walk({**world.envelopes(), "provenance": both}, trust)
    policy = Policy(require=["provenance"], signatures=2)
    assert judge_policy(policy, walked, NOW).verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: 2", "format"),
        ("requires: [provenance]", "requires: Extra inputs"),
        ("require: [everything]", "no such kind of evidence"),
        ("gates: {smem: failed}", "gates.smem"),
        ("max_age_days: 0", "max_age_days"),
        ("signatures: 0", "signatures"),
        ("a: 1\na: 2", "appears twice"),
    ],
)
def test_a_bad_policy_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(TrustInvalid, match=message):
        read_policy(path)


def test_a_good_policy_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("format: 1\nrequire: [provenance]\nmax_age_days: 90\n")
    assert read_policy(path) == Policy(require=["provenance"], max_age_days=90)


@pytest.mark.parametrize("card", ["sm_90", "sm_121"])
def test_a_result_for_another_card_satisfies_no_policy(world: World, card: str) -> None:
    other = world.lie("gate-smem-sm_120", lambda b: b["predicate"].update(sm120_card=card))
    walked = world.walk({**world.envelopes(), "gate-smem-sm_120": other})
    node = judge_policy(Policy.model_validate({"gates": {"smem": "passed"}}), walked, NOW)
    assert node.culprit().message == f"has no result that counts (for another card: {card})"


@pytest.mark.parametrize("days", [0, 36_501, 10**30])
def test_an_age_that_no_date_can_hold_is_refused(tmp_path: Path, days: int) -> None:
    (tmp_path / "policy.yaml").write_text(f"max_age_days: {days}\n")
    with pytest.raises(TrustInvalid, match="max_age_days"):
        read_policy(tmp_path / "policy.yaml")


def audit_of(
    world: World, *findings: dict[str, Any], newest: str = "2026-05-30T00:00:00Z"
) -> Envelope:
    """An audit of the image, signed with the good key; ids that begin with TEST- are made up."""
    usual: dict[str, Any] = {
        "aliases": [],
        "package": "pkg",
        "version": "1.0",
        "purl": "pkg:pypi/pkg@1.0",
    }
    usual |= {"via": None, "severity": "critical", "published": None, "fixed": [], "accepted": None}
    database = {"digest": "sha256:" + "1" * 64, "files": 1, "records": 9, "newest": newest}
    body = {
        "image": world.built.name,
        "platform": "linux/amd64",
        "database": database,
        "packages": 3,
        "unmatched": 0,
        "undecided": [],
        "findings": [{**usual, "id": f"TEST-{n}", **each} for n, each in enumerate(findings)],
        "tool": {"name": "sm120-pipeline", "version": "0.1.0"},
    }
    statement = make_statement(world.built.name, world.built.digest, AUDIT, body, WHEN)
    return enclose(statement, [LocalSigner(world.key)])


def audited(world: World, asked: dict[str, Any], envelope: Envelope | None) -> Node:
    good = world.envelopes()
    walked = world.walk(world.with_set({**good, "audit": envelope}) if envelope else good)
    assert walked.node.verdict is Verdict.VALID
    return judge_policy(Policy.model_validate({"audit": asked}), walked, NOW)


OLD, YOUNG = {"published": "2026-04-01T00:00:00Z"}, {"published": "2026-05-25T00:00:00Z"}
ACCEPTED = {"accepted": {"reason": "not reachable", "until": "2026-12-31"}}
EXPIRED = {"accepted": {"reason": "not reachable", "until": "2026-05-31"}}


@pytest.mark.parametrize(
    ("asked", "findings"),
    [
        ({}, []),
        ({}, [ACCEPTED]),
        ({}, [{"severity": "high"}, {"severity": "unrated"}]),
        ({"older_than_days": 14}, [YOUNG]),
        ({"severity": "critical", "older_than_days": 90}, [OLD]),
    ],
)
def test_an_audit_without_what_the_policy_refuses_satisfies(
    world: World, asked: dict[str, Any], findings: list[dict[str, Any]]
) -> None:
    assert audited(world, asked, audit_of(world, *findings)).verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("asked", "findings", "reason"),
    [
        ({}, [{}], "pkg 1.0 has TEST-0, critical"),
        ({}, [ACCEPTED, EXPIRED, {}], "pkg 1.0 has TEST-1, critical, and 1 more"),
        ({"severity": "high"}, [{"severity": "high"}], "TEST-0, high"),
        ({"older_than_days": 14}, [OLD], "TEST-0"),
        # without a time it may be as old as any
        ({"older_than_days": 14}, [{}], "TEST-0"),
        ({"count_unrated": True}, [{"severity": "unrated"}], "TEST-0, unrated"),
    ],
)
def test_what_an_audit_found_is_refused(
    world: World, asked: dict[str, Any], findings: list[dict[str, Any]], reason: str
) -> None:
    node = audited(world, asked, audit_of(world, *findings))
    assert node.verdict is Verdict.BROKEN
    assert reason in node.culprit().message


def test_a_missing_audit_and_an_old_database_are_refused(world: World) -> None:
    assert "is required" in audited(world, {}, None).culprit().message
    old = audit_of(world, newest="2026-03-01T00:00:00Z")
    assert "more than 30 days ago" in audited(world, {}, old).culprit().message
    asked = {"database_max_age_days": 100}
    assert audited(world, asked, old).verdict is Verdict.VALID


def test_verify_shows_what_an_audit_found(world: World) -> None:
    walked = world.walk(
        world.with_set({**world.envelopes(), "audit": audit_of(world, {}, ACCEPTED)})
    )
    (shown,) = [n.message for n in walked.node.every() if n.title == "audit"]
    assert shown == "2 known vulnerabilities, 1 accepted, by advisories until 2026-05-30T00:00:00Z"


def rebuilt_by(
    world: World, key: PrivateKey, machine: str | None = "x86_64", **lie: Any
) -> Envelope:
    """A rebuild by somebody, on some machine."""
    statement = rebuild_statement(world.built, LocalSigner(key), "", WHEN)
    predicate = {**statement.predicate, "machine": machine, **lie}
    predicate = {name: value for name, value in predicate.items() if value is not None}
    return enclose(statement.model_copy(update={"predicate": predicate}), [LocalSigner(key)])


def quorum(world: World, asked: dict[str, Any], *more: Envelope, **policy: Any) -> Node:
    trust = trust_in(trusted(world.key), trusted(world.other_key, "second"))
    # the publisher's set does not list what others state, and need not
    items = [read_item(name, e.dump()) for name, e in world.envelopes().items()]
    items += [read_item(f"rebuild-{n}", e.dump()) for n, e in enumerate(more)]
    walked = world.walk(items, trust=trust)
    return judge_policy(Policy.model_validate({"rebuilds": asked, **policy}), walked, NOW)


def test_two_people_on_two_architectures_satisfy_a_quorum(world: World) -> None:
    other = rebuilt_by(world, world.other_key, "riscv64")
    node = quorum(world, {"keys": 2, "architectures": 2}, other)
    assert node.verdict is Verdict.VALID
    assert node.children[0].message == f"builder on {platform.machine()}, second on riscv64"
    assert quorum(world, {"independent": True}, other).verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("asked", "others", "policy", "reason"),
    [
        ({"keys": 2}, 0, {}, "2 keys and 1 architecture are required"),
        # the same key twice is one person
        ({"keys": 2}, "same", {}, "2 keys"),
        ({"keys": 2, "architectures": 2}, 1, {}, "2 architectures are required"),
        ({"keys": 2, "architectures": 2}, None, {}, "2 architectures are required"),
        ({"independent": True}, 0, {}, "nobody whose key counts"),
        ({}, 1, {"keys": ["sha256:" + "0" * 64]}, "nobody whose key counts"),
        ({"keys": 2}, "different", {}, "2 keys"),
    ],
)
def test_a_quorum_that_is_not_met_is_refused(
    world: World, asked: dict[str, Any], others: Any, policy: dict[str, Any], reason: str
) -> None:
    own, other = platform.machine(), world.other_key
    more = {
        0: [],
        1: [rebuilt_by(world, other, own)],
        None: [rebuilt_by(world, other, None)],
        "same": [rebuilt_by(world, world.key, "riscv64")],
        "different": [rebuilt_by(world, other, identical=False, difference="usr/bin/tool")],
    }[others]
    node = quorum(world, asked, *more, **policy)
    assert node.verdict is Verdict.BROKEN
    assert reason in node.culprit().message


def test_a_rebuild_in_the_name_of_another_key_does_not_count(world: World) -> None:
    lie = rebuilt_by(world, world.other_key, rebuilt_by=key_id(world.key.public_key()))
    assert "2 keys" in quorum(world, {"keys": 2}, lie).culprit().message
