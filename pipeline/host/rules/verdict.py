"""One rule's answer, and what many of them add up to."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pipeline.host.facts.model import Gpu, HostFacts
from pipeline.known import Unknown
from pipeline.model import Frozen

Verdict: TypeAlias = Literal["passed", "failed", "unknown", "not applicable"]


class Judged(Frozen):
    """One rule's answer about one thing of a host."""

    rule: str
    subject: str
    verdict: Verdict
    why: str
    fix: str = ""


def row(rule: str, subject: str, good: object, why: str, fix: str) -> Judged:
    """Passed when good; a value that is not known is not judged."""
    if isinstance(good, Unknown):
        return Judged(rule=rule, subject=subject, verdict="unknown", why=good.unknown)
    verdict: Verdict = "passed" if good else "failed"
    return Judged(rule=rule, subject=subject, verdict=verdict, why=why, fix="" if good else fix)


def overall(rows: list[Judged]) -> Verdict:
    """The worst of all; nothing judged is unknown."""
    seen = {row.verdict for row in rows}
    order: tuple[Verdict, ...] = ("failed", "unknown", "passed")
    return next((v for v in order if v in seen), "unknown")


def gpus_of(facts: HostFacts) -> list[Gpu]:
    """The cards that answer."""
    return [] if isinstance(facts.gpus, Unknown) else facts.gpus
