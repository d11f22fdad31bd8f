"""The result of one rule, and the verdict over many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from pipeline.core.known import Unknown
from pipeline.core.model import Frozen
from pipeline.hosts.facts.model import Gpu, HostFacts

Verdict: TypeAlias = Literal["passed", "failed", "unknown", "not applicable"]


class RuleResult(Frozen):
    """The verdict of one rule on one part of a host."""

    rule: str
    subject: str
    verdict: Verdict
    why: str
    fix: str = ""


def result(
    rule: str, subject: str, good: object, why: str, fix: str, *, passed: str = ""
) -> RuleResult:
    """Passed when good, failed with its fix when not; an unknown value is not judged.

    `why` is the reason of a failure; `passed` is the text where the rule holds.
    """
    if isinstance(good, Unknown):
        return RuleResult(rule=rule, subject=subject, verdict="unknown", why=good.unknown)
    if good:
        return RuleResult(rule=rule, subject=subject, verdict="passed", why=passed or why)
    return RuleResult(rule=rule, subject=subject, verdict="failed", why=why, fix=fix)


def not_applicable(rule: str, subject: str, why: str) -> RuleResult:
    """A rule that has nothing to judge here."""
    return RuleResult(rule=rule, subject=subject, verdict="not applicable", why=why)


def overall_of_rules(verdicts: Iterable[str]) -> Literal["passed", "failed", "unknown"]:
    """The worst of all; where nothing was judged, unknown."""
    seen = set(verdicts)
    order: tuple[Literal["failed", "unknown", "passed"], ...] = ("failed", "unknown", "passed")
    return next((v for v in order if v in seen), "unknown")


def first_unknown(*values: object) -> Unknown | None:
    """The reason why a rule cannot be judged, where one of its values is unknown."""
    return next((x for x in values if isinstance(x, Unknown)), None)


def gpus_of(facts: HostFacts) -> list[Gpu]:
    """The cards that the driver reports."""
    return [] if isinstance(facts.gpus, Unknown) else facts.gpus
