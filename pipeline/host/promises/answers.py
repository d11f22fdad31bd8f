"""How a promise can turn out, other than kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from pipeline.host.rules.verdict import Verdict
from pipeline.known import Unknown


class Answer(Exception):
    """A promise that is not simply kept: its verdict, why, and what helps."""

    verdict: Verdict = "failed"

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why, self.fix = " ".join(why.split())[:400], fix


class Broken(Answer):
    """It does not hold."""


class Unsure(Answer):
    """It cannot be told whether it holds."""

    verdict = "unknown"


class Moot(Answer):
    """There is nothing on this host that it could be about."""

    verdict = "not applicable"


Test = TypeVar("Test", bound=Callable[..., None])


def known_by(rule: str) -> Callable[[Test], Test]:
    """Tie a promise to the rule under which the table of known issues has its cause and fix."""

    def tied(test: Test) -> Test:
        test.rule = rule  # type: ignore[attr-defined]
        return test

    return tied


def require(good: object, why: str, fix: str = "") -> None:
    """Broken unless good; what is not known is not judged."""
    if isinstance(good, Unknown):
        raise Unsure(good.unknown)
    if not good:
        raise Broken(why, fix)


def require_none(wrong: Sequence[str], why: str, fix: str = "") -> None:
    """Broken where anything is in the list; names the first few."""
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Broken(f"{why}: {', '.join(wrong[:3])}{more}", fix)


def moot(why: str) -> NoReturn:
    """Say that there is nothing to judge."""
    raise Moot(why)
