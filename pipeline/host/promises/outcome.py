"""How a promise can turn out other than kept, and the checks that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

from pipeline.host.rules.verdict import Verdict, first_unknown
from pipeline.known import Known, Unknown, Value


class Outcome(Exception):
    """A promise that is not simply kept: its verdict, the reason, and the fix."""

    verdict: Verdict = "failed"

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why, self.fix = " ".join(why.split())[:400], fix


class Broken(Outcome):
    """The promise does not hold."""


class Undecided(Outcome):
    """Whether the promise holds cannot be determined."""

    verdict = "unknown"


class NotApplicable(Outcome):
    """The promise has nothing to judge on this host."""

    verdict = "not applicable"


Test = TypeVar("Test", bound=Callable[..., None])


def known_by(rule: str) -> Callable[[Test], Test]:
    """Tie a promise to the rule by which known issues refer to it."""

    def tied(test: Test) -> Test:
        test.rule = rule  # type: ignore[attr-defined]
        return test

    return tied


def require(good: object, why: str, fix: str = "") -> None:
    """Broken unless good; an unknown value is not judged."""
    if not known(good):
        raise Broken(why, fix)


def known(value: Known[Value]) -> Value:
    """The value; undecided where there is none."""
    if isinstance(value, Unknown):
        raise Undecided(value.unknown)
    return value


def require_known(values: Iterable[object]) -> None:
    """Undecided where one of the values is unknown."""
    reason = first_unknown(*values)
    if reason is not None:
        raise Undecided(reason.unknown)


def require_none(wrong: Sequence[str], why: str, fix: str = "") -> None:
    """Broken where anything is in the list; names the first few."""
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Broken(f"{why}: {', '.join(wrong[:3])}{more}", fix)


def not_applicable(why: str) -> NoReturn:
    """End a test that has nothing to judge."""
    raise NotApplicable(why)
