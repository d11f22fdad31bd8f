"""Gate results as in-toto test results, written and read back.

Failures are stated like successes. The format has no `unknown`: such tests count as failed there,
and `sm120_unknown` has the reason for each.
https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pipeline.attest.names import TEST_RESULT
from pipeline.attest.statement import DigestSet, Moment, Statement, make_statement
from pipeline.attest.strict import as_model, plain
from pipeline.errors import RecordInvalid
from pipeline.gate.evidence import Evidence, ImageGates
from pipeline.model import Frozen

GateVerdict = Literal["passed", "accepted", "failed", "unknown"]
_RESULTS: dict[GateVerdict, Literal["PASSED", "WARNED", "FAILED"]] = {
    "passed": "PASSED",
    "accepted": "WARNED",
    "failed": "FAILED",
    # nobody may take what was not judged for a success
    "unknown": "FAILED",
}


class _Input(Frozen):
    name: str
    digest: DigestSet


class _Reason(Frozen):
    test: str
    verdict: GateVerdict
    why: str


class TestResult(Frozen):
    """in-toto's test result, with what our gates add."""

    __test__ = False

    result: Literal["PASSED", "WARNED", "FAILED"]
    configuration: list[_Input]
    passed: list[str] = Field(alias="passedTests")
    warned: list[str] = Field(alias="warnedTests")
    failed: list[str] = Field(alias="failedTests")
    gate: str = Field(alias="sm120_gate")
    card: str = Field(alias="sm120_card")
    verdict: GateVerdict = Field(alias="sm120_verdict")
    unknown: list[_Reason] = Field(alias="sm120_unknown")
    why: list[_Reason] = Field(alias="sm120_why")
    made_by: dict[str, str] = Field(alias="sm120_madeBy")
    recorded: Moment | None = Field(default=None, alias="sm120_recorded")


def gate_statements(gates: ImageGates, when: Moment | None = None) -> dict[str, Statement]:
    """A statement for each gate and card, by a name that a file can have."""
    return {
        f"{result.gate}-{result.arch}": make_statement(
            gates.image, gates.image_digest, TEST_RESULT, gate_predicate(result), when
        )
        for result in gates.results
    }


def gate_predicate(result: Evidence) -> dict[str, Any]:
    """A gate's result as the predicate of a statement."""
    unknown = [
        _Reason(test=plain(row.name), verdict="unknown", why=plain(row.message) or "not said")
        for row in result.rows
        if row.verdict == "unknown"
    ]
    # a gate that could not even start has no rows
    if result.verdict == "unknown" and not unknown:
        why = plain(result.message) or "no test was run"
        unknown = [_Reason(test=result.gate, verdict="unknown", why=why)]
    predicate = TestResult(
        result=_RESULTS[result.verdict],
        configuration=[
            _Input(name=name, digest=DigestSet(sha256=digest.removeprefix("sha256:")))
            for name, digest in sorted(result.inputs.items())
        ],
        passedTests=_tests(result, "passed"),
        warnedTests=_tests(result, "accepted"),
        failedTests=sorted({*_tests(result, "failed"), *(x.test for x in unknown)}),
        sm120_gate=result.gate,
        sm120_card=result.arch,
        sm120_verdict=result.verdict,
        sm120_unknown=unknown,
        sm120_why=[
            _Reason(test=plain(row.name), verdict=row.verdict, why=plain(row.message))
            for row in result.rows
            if row.verdict != "unknown" and row.message
        ],
        sm120_madeBy=result.made_by,
    )
    # the time is added where statements keep it: `sm120_recorded` is not written as null
    return predicate.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _tests(result: Evidence, verdict: GateVerdict) -> list[str]:
    return sorted(plain(row.name) for row in result.rows if row.verdict == verdict)


def read_test_result(predicate: dict[str, Any]) -> TestResult:
    """A gate's result that does not contradict itself."""
    result = as_model(TestResult, predicate, "test result", "the predicate")
    # counted again from the tests: a verdict alone could claim anything
    unknown = {x.test for x in result.unknown}
    really: GateVerdict = "passed"
    # an image without CUDA code gives the machine code gate nothing to judge; others must judge
    is_empty = not result.passed and not result.warned and result.gate != "arch"
    if set(result.failed) - unknown:
        really = "failed"
    elif result.failed or unknown or is_empty:
        really = "unknown"
    elif result.warned:
        really = "accepted"
    if result.verdict != really or result.result != _RESULTS[really]:
        raise RecordInvalid(
            f"test result: the verdict is {result.verdict}, but its tests amount to {really}"
        )
    return result
