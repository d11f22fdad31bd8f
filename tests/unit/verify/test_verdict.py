"""The tree says the worst, shows where, and ends accordingly."""

from __future__ import annotations

import pytest

from pipeline.evidence.verify.verdict import Node, Verdict, show, verdict_error, worst_verdict
from tests.docs.error_table import error_families

GOOD, BAD = Node("good"), Node("bad", Verdict.BROKEN, "is wrong")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], Verdict.INCOMPLETE),
        ([Verdict.VALID, Verdict.STALE], Verdict.STALE),
        ([Verdict.STALE, Verdict.INCOMPLETE], Verdict.INCOMPLETE),
        ([Verdict.UNSIGNED, Verdict.INCOMPLETE], Verdict.INCOMPLETE),
        ([Verdict.UNSIGNED, Verdict.STALE], Verdict.STALE),
        ([Verdict.UNSIGNED, Verdict.VALID], Verdict.UNSIGNED),
        ([Verdict.BROKEN, Verdict.UNSIGNED], Verdict.BROKEN),
    ],
)
def test_the_worst_counts_and_nothing_is_not_valid(
    verdicts: list[Verdict], expected: Verdict
) -> None:
    assert worst_verdict(verdicts) is expected


def test_the_tree_shows_every_node_that_is_not_folded_away() -> None:
    many = Node("many", children=(GOOD, GOOD, BAD), is_folded=True)
    tree = Node("top", children=(Node("one", message="fine"), many))
    assert show(tree).splitlines() == [
        "top  broken",
        "├─ one  valid: fine",
        "└─ many  broken",
        "   └─ bad  broken: is wrong",
    ]
    assert len(show(tree, everything=True).splitlines()) == 6
    assert tree.as_json()["children"][1]["children"][2]["verdict"] == "broken"


def test_the_ending_names_the_culprit() -> None:
    error = verdict_error(Node("top", children=(GOOD, Node("mid", children=(BAD,)))))
    assert str(error) == "top: bad: is wrong"
    assert verdict_error(GOOD) is None
    assert str(verdict_error(Node("alone", Verdict.STALE))) == "alone: stale"


def test_only_broken_evidence_is_not_to_be_used_and_unsigned_evidence_holds() -> None:
    warning = "Do not use it before you know why; the tree above shows where."
    hints = {v: verdict_error(Node("x", v)) for v in Verdict if v is not Verdict.VALID}
    assert [v for v, error in hints.items() if error and error.hint == warning] == [Verdict.BROKEN]
    unsigned = Node("signature", Verdict.UNSIGNED, "nobody signed it")
    assert str(verdict_error(Node("top", children=(GOOD, unsigned)))) == (
        "top: valid but unsigned (signature: nobody signed it)"
    )


def test_every_bad_verdict_has_an_exit_code_of_its_own() -> None:
    bad = [v for v in Verdict if v is not Verdict.VALID]
    errors = [verdict_error(Node("x", verdict)) for verdict in bad]
    codes = [error.exit_code for error in errors if error]
    assert len(set(codes)) == len(bad)
    assert set(codes) <= {family.exit_code for family in error_families()}
