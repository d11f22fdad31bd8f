"""The words of all verdicts, the worst of many, and a row with a text for each outcome."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, TypeVar

from pipeline.core.known import Unknown
from pipeline.core.model import Frozen

Verdict: TypeAlias = Literal[
    "passed",
    "accepted",  # over a limit, and a person wrote down why that is all right
    "failed",
    "unknown",  # it could not be judged
    "skipped",  # this image, model or server does not have it
    "not applicable",  # there is nothing to judge
    "not reached",  # a host that gave no answer
]
# What each kind of test can end with. Files and statements are read by these: no other word passes.
RunVerdict: TypeAlias = Literal["passed", "failed", "unknown"]
GateVerdict: TypeAlias = Literal["passed", "accepted", "failed", "unknown"]
TestVerdict: TypeAlias = Literal["passed", "failed", "unknown", "skipped"]
RuleVerdict: TypeAlias = Literal["passed", "failed", "unknown", "not applicable"]
LadderVerdict: TypeAlias = Literal["passed", "failed", "skipped"]

Word = TypeVar("Word", bound=Verdict)
# From worst to best. What was skipped or has nothing to judge says nothing about the rest.
_ORDER: tuple[Verdict, ...] = ("failed", "not reached", "unknown", "accepted", "passed")


def worst(verdicts: Iterable[Word], nothing: Word) -> Word:
    """The verdict on all together; `nothing` where none of them was judged."""
    judged = (each for each in verdicts if each in _ORDER)
    return min(judged, key=_ORDER.index, default=nothing)


class RuleResult(Frozen):
    """The verdict of one rule on one thing; code knows the rule by its name, people read why."""

    rule: str
    subject: str
    verdict: RuleVerdict
    why: str
    fix: str = ""


def result(
    rule: str, subject: str, good: object, failed: str, fix: str, *, passed: str
) -> RuleResult:
    """Passed when good, failed with its fix when not, each with its own text.

    An unknown value is not judged: the reason is why nobody knows it.
    """
    if isinstance(good, Unknown):
        return unknown_result(rule, subject, good)
    if good:
        return RuleResult(rule=rule, subject=subject, verdict="passed", why=passed)
    return RuleResult(rule=rule, subject=subject, verdict="failed", why=failed, fix=fix)


def unknown_result(rule: str, subject: str, why: Unknown) -> RuleResult:
    """A rule that could not be judged."""
    return RuleResult(rule=rule, subject=subject, verdict="unknown", why=why.unknown)


def not_applicable(rule: str, subject: str, why: str) -> RuleResult:
    """A rule that has nothing to judge here."""
    return RuleResult(rule=rule, subject=subject, verdict="not applicable", why=why)
