"""The worst of many verdicts, and rows with a text for each outcome."""

from __future__ import annotations

from itertools import permutations

import pytest

from pipeline.core.known import unknown
from pipeline.core.verdict import Verdict, not_applicable, result, unknown_result, worst

FROM_WORST: list[Verdict] = ["failed", "not reached", "unknown", "accepted", "passed"]


def test_the_worst_counts_in_any_order() -> None:
    for at, wanted in enumerate(FROM_WORST):
        for verdicts in permutations(FROM_WORST[at:]):
            assert worst(verdicts, "unknown") == wanted


@pytest.mark.parametrize("unjudged", ["skipped", "not applicable"])
def test_what_was_not_judged_changes_nothing(unjudged: Verdict) -> None:
    for verdict in FROM_WORST:
        mixed: list[Verdict] = [unjudged, verdict, unjudged]
        assert worst(mixed, "unknown") == verdict


@pytest.mark.parametrize("nothing", ["unknown", "skipped"])
def test_nothing_judged_never_passes_by_itself(nothing: Verdict) -> None:
    assert worst([], nothing) == nothing
    unjudged: list[Verdict] = ["skipped", "not applicable"]
    assert worst(unjudged, nothing) == nothing


@pytest.mark.parametrize(
    ("good", "verdict", "why", "fix"),
    [
        (True, "passed", "is free", ""),
        (False, "failed", "is taken", "Free it."),
        (unknown("nobody looked"), "unknown", "nobody looked", ""),
    ],
)
def test_a_row_has_the_text_of_its_outcome(good: object, verdict: str, why: str, fix: str) -> None:
    row = result("port", "8000", good, "is taken", "Free it.", passed="is free")
    assert (row.rule, row.subject, row.verdict, row.why, row.fix) == (
        "port",
        "8000",
        verdict,
        why,
        fix,
    )


def test_a_row_that_was_not_judged_needs_no_text_for_an_outcome() -> None:
    assert unknown_result("port", "8000", unknown("nobody looked")).verdict == "unknown"
    assert not_applicable("port", "8000", "there is none").verdict == "not applicable"
