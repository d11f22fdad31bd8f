"""Known issues as data, recognised in logs, in function tests, in facts and on the smoke ladder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, model_validator

from pipeline.core.model import Frozen, Name
from pipeline.core.verdict import RuleResult

TABLE = Path(__file__).with_name("known_issues.yaml")
# Symptoms stand within this many characters of a line, and expressions stay fast.
_LONGEST = 4000
_SHOWN = 5  # lines of each issue


# an expression that does not compile is refused when the table is read
Pattern = Annotated[str, AfterValidator(lambda text: re.compile(text).pattern)]


class RungSymptom(Frozen):
    """A check of the smoke ladder that fails with such a message."""

    rung: Name
    message: Pattern  # for `check: message`


class Issue(Frozen):
    """One known issue."""

    id: Name
    title: str
    symptoms: list[Pattern] = []
    rules: list[str] = []
    # wrong words leave no line in any log: the ladder sees them
    rungs: list[RungSymptom] = []
    cause: str
    fix: str
    sources: list[str] = Field(min_length=1)

    @model_validator(mode="after")
    def _can_be_recognised(self) -> Issue:
        if not (self.symptoms or self.rungs):
            raise ValueError(f"{self.id}: needs `symptoms` or `rungs`")
        return self


class IssueFinding(Frozen):
    """An issue, and where it was recognised."""

    issue: Issue
    seen: list[str]  # `log:12: the line`, at most a few
    times: int


@cache
def known_issues() -> tuple[Issue, ...]:
    """The table, in order of its ids."""
    rows = TypeAdapter(list[Issue]).validate_python(yaml.safe_load(TABLE.read_text("utf-8")))
    return tuple(sorted(rows, key=lambda i: i.id))


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((i.id, re.compile("|".join(i.symptoms))) for i in known_issues() if i.symptoms)


def match_lines(name: str, lines: Iterable[str]) -> dict[str, list[str]]:
    """Issue ids with the lines in which they were recognised."""
    matches: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        short = line[:_LONGEST].rstrip()
        for issue, pattern in _patterns():
            if pattern.search(short):
                seen = matches.setdefault(issue, [])
                # a log may repeat a line millions of times: the others only count
                seen.append(f"{name}:{number}: {short[:200]}" if len(seen) < _SHOWN else "")
    return matches


def match_rules(rows: Iterable[RuleResult]) -> dict[str, list[str]]:
    """Issue ids by rules that failed."""
    matches: dict[str, list[str]] = {}
    for row in rows:
        for issue in known_issues():
            if row.verdict == "failed" and row.rule in issue.rules:
                line = f"facts: {row.rule}, {row.subject}: {row.why}"
                matches.setdefault(issue.id, []).append(line)
    return matches


def match_rungs(failures: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Issue ids by checks of the smoke ladder that failed: a rung, and `check: message`."""
    matches: dict[str, list[str]] = {}
    for rung, message in failures:
        short = message[:_LONGEST]
        for issue in known_issues():
            if any(s.rung == rung and re.search(s.message, short) for s in issue.rungs):
                matches.setdefault(issue.id, []).append(f"{rung}: {short[:200]}")
    return matches


def issue_findings(matches: Iterable[dict[str, list[str]]]) -> list[IssueFinding]:
    """Make one finding for each issue in all matches."""
    seen: dict[str, list[str]] = {}
    for match in matches:
        for issue, lines in match.items():
            seen.setdefault(issue, []).extend(lines)
    return [
        IssueFinding(issue=i, seen=[x for x in seen[i.id] if x][:_SHOWN], times=len(seen[i.id]))
        for i in known_issues()
        if i.id in seen
    ]
