"""The result of each host, and the verdict over all of them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import computed_field

from pipeline.core.model import Frozen
from pipeline.hosts.facts.drift import Difference
from pipeline.hosts.probes.runner import ProbeRow
from pipeline.hosts.rules.issues import Finding, findings, match_lines, match_rules
from pipeline.hosts.rules.verdict import RuleResult, Verdict, overall

HostVerdict: TypeAlias = Literal["passed", "failed", "unknown", "not reached"]


class Row(Frozen):
    """One promise of one role, kept or not."""

    role: str
    promise: str
    verdict: Verdict
    why: str = ""
    fix: str = ""
    # the name of the rule over facts by which known issues refer to this promise
    rule: str = ""


class HostResult(Frozen):
    """One host. A host that was not reached has no rows, and is never called passed."""

    host: str
    unreached: str | None = None
    rows: list[Row] = []
    rules: list[RuleResult] = []
    functions: list[ProbeRow] = []
    drift: list[Difference] | None = None  # None: there is no record to compare with
    output: list[str] = []  # of function tests; known issues are recognised in it

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> HostVerdict:
        """The worst of all that was judged; nothing judged is unknown."""
        if self.unreached is not None:
            return "not reached"
        return overall(self._verdicts())

    @computed_field  # type: ignore[prop-decorator]
    @property
    def findings(self) -> list[Finding]:
        """Known issues that explain what failed."""
        judged = [
            RuleResult(rule=r.rule, subject=r.role, verdict=r.verdict, why=r.why)
            for r in self.rows
            if r.rule
        ]
        return findings([match_rules([*judged, *self.rules]), match_lines("tests", self.output)])

    def count(self, verdict: Verdict) -> int:
        """How many rows have this verdict."""
        return self._verdicts().count(verdict)

    def _verdicts(self) -> list[Verdict]:
        rows = [r.verdict for r in self.rows]
        return rows + [r.verdict for r in self.rules] + [r.verdict for r in self.functions]


class FleetResult(Frozen):
    """All hosts of one verification."""

    version: Literal[1] = 1
    hosts: list[HostResult]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> HostVerdict:
        """The worst of all hosts."""
        seen = {h.verdict for h in self.hosts}
        if "not reached" in seen and "failed" not in seen:
            return "not reached"
        return overall(seen)


def not_tested(why: str) -> ProbeRow:
    """In the place of function tests that did not run."""
    return ProbeRow(check="functions", subject="cards", verdict="unknown", why=why, measured={})
