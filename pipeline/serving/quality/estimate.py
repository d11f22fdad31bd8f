"""Numbers with intervals: shares of cases, and means over groups of places.

A verdict follows from the whole interval: one that lies on both sides of the bar decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from pipeline.core.model import Count, Frozen
from pipeline.core.verdict import RunVerdict

CONFIDENCE = 0.95
_Z = 1.959963984540054  # of the normal distribution, for 95 % between both ends
_DRAWS, _SEED = 2000, 120


class Estimate(Frozen):
    """A value, and where the true one is with 95 % confidence."""

    value: float
    low: float
    high: float
    n: Count  # what was counted or averaged
    method: str

    def at_least(self, bar: float) -> RunVerdict:
        """Whether the true value reaches a bar."""
        return "passed" if self.low >= bar else "failed" if self.high < bar else "unknown"

    def at_most(self, bar: float) -> RunVerdict:
        """Whether the true value stays below a bar."""
        return "passed" if self.high <= bar else "failed" if self.low > bar else "unknown"


def wilson(good: float, of: float) -> Estimate:
    """A share with Wilson's interval, which holds near 0 and 1, too; both may be effective sizes.

    Wilson 1927; Brown, Cai and DasGupta 2001, https://doi.org/10.1214/ss/1009213286
    """
    if of == 0:
        return Estimate(value=0.0, low=0.0, high=1.0, n=0, method="no case")
    share, z2 = good / of, _Z * _Z
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    # rounding must not put the end of all or none beyond the value itself
    low = 0.0 if good == 0 else max(0.0, middle - half)
    high = 1.0 if good == of else min(1.0, middle + half)
    return Estimate(value=share, low=low, high=high, n=round(of), method="Wilson")


def bootstrap(groups: Sequence[Sequence[float]], *, is_share: bool = False) -> Estimate:
    """The mean over all places; draws whole groups, as places of one text depend on each other.

    For a mean, studentised draws (bootstrap-t: Efron and Tibshirani 1993, chapter 12). For a share,
    percentiles of the draws, and no less than Wilson's interval for as many independent places as
    the groups are worth: near 1, most draws hold no miss, and know nothing of those to come.
    """
    filled = [(math.fsum(group), len(group)) for group in groups if group]
    places = sum(size for _, size in filled)
    if not filled:
        return Estimate(value=0.0, low=-math.inf, high=math.inf, n=0, method="no place")

    def mean_and_error(drawn: Sequence[tuple[float, int]]) -> tuple[float, float]:
        """The ratio of two sums, and its error by linearisation."""
        n = sum(size for _, size in drawn)
        mean = math.fsum(total for total, _ in drawn) / n
        squares = math.fsum((total - mean * size) ** 2 for total, size in drawn)
        return mean, math.sqrt(squares * len(drawn) / max(1, len(drawn) - 1)) / n

    value, error = mean_and_error(filled)
    dice = Random(_SEED)  # noqa: S311 - the same interval for the same answers
    drawn = [
        mean_and_error(dice.choices(filled, k=len(filled))) for _ in range(_DRAWS if error else 1)
    ]
    cut = round((1 - CONFIDENCE) / 2 * len(drawn))
    if is_share:
        means = sorted(mean for mean, _ in drawn)
        # without any spread, a group counts once
        worth = min(places, value * (1 - value) / error**2) if error else len(filled)
        least = wilson(value * worth, worth)
        low, high = min(means[cut], least.low), max(means[-cut - 1], least.high)
        method = "bootstrap over groups, at least Wilson"
    else:
        # a draw without any spread: as far off as its mean is, in the error of all
        ratios = sorted((mean - value) / (its or error or 1.0) for mean, its in drawn)
        low, high = value - ratios[-cut - 1] * error, value - ratios[cut] * error
        method = "bootstrap-t over groups"
    return Estimate(value=value, low=low, high=high, n=places, method=method)
