"""A policy asks for more than that nothing is wrong."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import countersigned
from pipeline.artifacts.attest.keys import LocalSigner, key_id
from pipeline.core.errors import TrustInvalid
from pipeline.evidence.verify.chain import Policy, judge_policy, read_policy
from pipeline.evidence.verify.verdict import Node, Verdict
from tests.unit.verify.world import NOW, World, trust_in, trusted


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
