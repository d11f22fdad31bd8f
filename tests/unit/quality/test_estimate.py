"""Intervals hold as often as they say."""

from __future__ import annotations

import math
from random import Random

import pytest

from pipeline.serving.quality import estimate
from pipeline.serving.quality.estimate import Estimate, bootstrap, wilson

_RUNS = 200


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_DRAWS", 200)


def texts(dice: Random, groups: int, share: float, alike: float) -> list[list[float]]:
    """Places that agree or not; those of one text have something in common."""
    a, b = share * (1 - alike) / alike, (1 - share) * (1 - alike) / alike
    chances = [dice.betavariate(a, b) for _ in range(groups)]
    return [[float(dice.random() < c) for _ in range(dice.randint(5, 12))] for c in chances]


@pytest.mark.parametrize("share", [0.8, 0.95, 0.99])
def test_a_share_of_places_in_texts_is_covered_as_often_as_said(share: float) -> None:
    dice = Random(7)
    runs = [bootstrap(texts(dice, 64, share, 0.05), is_share=True) for _ in range(_RUNS)]
    covered = sum(run.low <= share <= run.high for run in runs) / _RUNS
    assert 0.91 <= covered <= 1.0


def test_a_skewed_mean_is_covered_as_often_as_said() -> None:
    dice, covered = Random(8), 0
    for _ in range(_RUNS):
        means = [dice.expovariate(20) for _ in range(64)]
        groups = [[dice.expovariate(1 / (m + 0.01)) for _ in range(8)] for m in means]
        run = bootstrap(groups)
        covered += run.low <= 0.06 <= run.high
    assert 0.91 <= covered / _RUNS <= 0.99


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.99])
def test_a_share_of_cases_is_covered_as_often_as_said(share: float) -> None:
    n = 400
    # exactly, by the binomial distribution
    covered = math.fsum(
        math.comb(n, k) * share**k * (1 - share) ** (n - k)
        for k in range(n + 1)
        if wilson(k, n).low <= share <= wilson(k, n).high
    )
    assert 0.93 <= covered <= 0.975


@pytest.mark.parametrize(
    ("good", "of", "low", "high"),
    # R: prop.test(good, of, correct = FALSE)
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (45, 50, 0.7864, 0.9565), (5, 10, 0.2366, 0.7634)],  # noqa: E501
)  # fmt: skip
def test_shares_have_the_interval_of_the_books(good: int, of: int, low: float, high: float) -> None:
    found = wilson(good, of)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)


def test_the_same_answers_give_the_same_interval() -> None:
    groups = texts(Random(3), 30, 0.9, 0.1)
    assert bootstrap(groups, is_share=True) == bootstrap(groups, is_share=True)


def test_where_all_agree_the_number_of_texts_decides() -> None:
    found = bootstrap([[1.0] * 8] * 96, is_share=True)
    assert (found.value, found.high, found.n) == (1.0, 1.0, 768)
    assert found.low == pytest.approx(wilson(96, 96).low)
    same = bootstrap([[0.0] * 8] * 96)
    assert (same.low, same.value, same.high) == (0.0, 0.0, 0.0)


def test_what_reaches_over_the_bar_is_not_decided() -> None:
    found = Estimate(value=0.95, low=0.9, high=0.97, n=100, method="")
    assert [found.at_least(bar) for bar in (0.89, 0.95, 0.98)] == ["passed", "unknown", "failed"]
    assert [found.at_most(bar) for bar in (0.89, 0.95, 0.98)] == ["failed", "unknown", "passed"]
    nothing = bootstrap([])
    assert nothing.at_least(0.5) == nothing.at_most(0.5) == "unknown"
