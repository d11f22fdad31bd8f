"""Gate results as in-toto test results. Failures are stated like successes; unknown is no pass."""

from __future__ import annotations

from typing import Any

from pipeline.attest.names import TEST_RESULT
from pipeline.attest.statement import Moment, Statement, make_statement
from pipeline.attest.strict import plain
from pipeline.gate.evidence import Evidence, ImageGates

_RESULTS = {"passed": "PASSED", "accepted": "WARNED", "failed": "FAILED", "unknown": "FAILED"}


def gate_statements(gates: ImageGates, when: Moment | None = None) -> dict[str, Statement]:
    """A statement for each gate and card, by a name that a file can have."""
    return {
        f"{found.gate}-{found.arch}": make_statement(
            gates.image, gates.image_digest, TEST_RESULT, gate_predicate(found), when
        )
        for found in gates.results
    }


def gate_predicate(found: Evidence) -> dict[str, Any]:
    """The predicate. The format has no `unknown`: such tests count as failed, and say why."""
    told = {verdict: _names(found, verdict) for verdict in _RESULTS}
    unknown = [
        {"test": plain(row.name), "verdict": "unknown", "why": plain(row.words) or "not said"}
        for row in found.rows
        if row.verdict == "unknown"
    ]
    if found.verdict == "unknown" and not unknown:
        words = plain(found.words) or "no test was run"
        unknown = [{"test": found.gate, "verdict": "unknown", "why": words}]
    return {
        "result": _RESULTS[found.verdict],
        "configuration": [
            {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}
            for name, digest in sorted(found.inputs.items())
        ],
        "passedTests": told["passed"],
        "warnedTests": told["accepted"],
        "failedTests": sorted({*told["failed"], *(x["test"] for x in unknown)}),
        "sm120_gate": found.gate,
        "sm120_card": found.arch,
        "sm120_verdict": found.verdict,
        "sm120_unknown": unknown,
        "sm120_why": _why(found, "passed", "accepted", "failed"),
        "sm120_madeBy": found.made_by,
    }


def _why(found: Evidence, *verdicts: str) -> list[dict[str, str]]:
    return [
        {"test": plain(row.name), "verdict": row.verdict, "why": plain(row.words)}
        for row in found.rows
        if row.verdict in verdicts and row.words
    ]


def _names(found: Evidence, verdict: str) -> list[str]:
    return sorted(plain(row.name) for row in found.rows if row.verdict == verdict)
