"""Results of gates and of runs as in-toto test results, written and read back.

Failures are stated like successes. The format has no `unknown`: such tests count as failed there,
and `sm120_unknown` has the reason for each. A skipped test is neither passed nor failed.
https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from pipeline.artifacts.attest.names import TEST_RESULT
from pipeline.artifacts.attest.statement import DigestSet, Moment, Statement, make_statement
from pipeline.artifacts.attest.strict import as_model, plain
from pipeline.core.errors import RecordInvalid
from pipeline.core.known import Unknown
from pipeline.core.known import unknown as unknown_reason
from pipeline.core.model import Frozen, Name
from pipeline.core.verdict import GateVerdict, RunVerdict, TestVerdict
from pipeline.images.gate.evidence import ImageGates
from pipeline.images.gate.runs import (
    LADDERS,
    OF_ADDRESS,
    OF_RECIPE,
    ImageRun,
    RunKind,
    summary_of,
)

_RESULTS: dict[GateVerdict, Literal["PASSED", "WARNED", "FAILED"]] = {
    "passed": "PASSED",
    "accepted": "WARNED",
    "failed": "FAILED",
    # an unjudged test must not pass for a success
    "unknown": "FAILED",
}
# A smoke of a recipe names these by digest, and a smoke of an address cannot know them.
BEHIND = ("image", "weights", "recipe")


class _Input(Frozen):
    name: str
    digest: DigestSet


class _Reason(Frozen):
    test: str
    why: str


class _GateReason(_Reason):
    verdict: GateVerdict


class _Result(Frozen):
    """in-toto's test result, with what gates and runs add alike."""

    configuration: list[_Input]
    passed: list[str] = Field(alias="passedTests")
    failed: list[str] = Field(alias="failedTests")
    made_by: dict[str, str] = Field(alias="sm120_madeBy")
    recorded: Moment | None = Field(default=None, alias="sm120_recorded")


class TestResult(_Result):
    """A gate's result."""

    __test__ = False

    result: Literal["PASSED", "WARNED", "FAILED"]
    warned: list[str] = Field(alias="warnedTests")
    gate: str = Field(alias="sm120_gate")
    card: str = Field(alias="sm120_card")
    verdict: GateVerdict = Field(alias="sm120_verdict")
    unknown: list[_GateReason] = Field(alias="sm120_unknown")
    why: list[_GateReason] = Field(alias="sm120_why")


class RunResult(_Result):
    """A run's result: of a start, a smoke ladder or a comparison of quality."""

    result: Literal["PASSED", "FAILED"]
    warned: list[str] = Field(alias="warnedTests", max_length=0)
    kind: RunKind = Field(alias="sm120_run")
    recipe: Name | None = Field(alias="sm120_recipe")
    last_good: str | None = Field(alias="sm120_lastGood")
    verdict: RunVerdict = Field(alias="sm120_verdict")
    unknown: list[_Reason] = Field(alias="sm120_unknown")
    skipped: list[_Reason] = Field(alias="sm120_skipped")
    why: list[_Reason] = Field(alias="sm120_why")
    machine: dict[str, str] = Field(alias="sm120_machine")
    # of an address alone: why each of `BEHIND` is not known
    behind: dict[Literal["image", "weights", "recipe"], Unknown] | None = Field(
        default=None, alias="sm120_behind"
    )

    def summary(self) -> str:
        """How far the run proves the image, for people."""
        return summary_of(self.kind, self.recipe, self.verdict, self.last_good)


def _inputs(digests: Mapping[str, str]) -> list[_Input]:
    shas = {name: digest.removeprefix("sha256:") for name, digest in sorted(digests.items())}
    return [_Input(name=name, digest=DigestSet(sha256=sha)) for name, sha in shas.items()]


def gate_statements(gates: ImageGates, when: Moment | None = None) -> dict[str, Statement]:
    """A statement for each gate and card, by a name that a file can have."""
    statements: dict[str, Statement] = {}
    for result in gates.results:
        names: dict[str, list[str]] = {}
        unknown, why = [], []
        for row in result.rows:
            name, message = plain(row.name), plain(row.message)
            names.setdefault(row.verdict, []).append(name)
            if row.verdict == "unknown":
                unknown.append(_GateReason(test=name, verdict="unknown", why=message or "not said"))
            elif row.message:
                why.append(_GateReason(test=name, verdict=row.verdict, why=message))
        # a gate that could not even start has no rows
        if result.verdict == "unknown" and not unknown:
            reason = plain(result.message) or "no test was run"
            unknown = [_GateReason(test=result.gate, verdict="unknown", why=reason)]
        predicate = TestResult(
            result=_RESULTS[result.verdict],
            configuration=_inputs(result.inputs),
            passedTests=sorted(names.get("passed", [])),
            warnedTests=sorted(names.get("accepted", [])),
            failedTests=sorted({*names.get("failed", []), *(x.test for x in unknown)}),
            sm120_gate=result.gate,
            sm120_card=result.arch,
            sm120_verdict=result.verdict,
            sm120_unknown=unknown,
            sm120_why=why,
            sm120_madeBy=result.made_by,
        )
        # the time is added where statements keep it: `sm120_recorded` is not written as null
        body = predicate.model_dump(mode="json", by_alias=True, exclude_unset=True)
        about = (gates.image, gates.image_digest, TEST_RESULT)
        statements[f"{result.gate}-{result.arch}"] = make_statement(*about, body, when)
    return statements


def read_test_result(predicate: dict[str, Any]) -> TestResult:
    """A gate's result that does not contradict itself."""
    result = as_model(TestResult, predicate, "test result", "the predicate")
    # an image without CUDA code gives the machine code gate nothing to judge; others must judge
    is_empty = not result.passed and not result.warned and result.gate != "arch"
    really: GateVerdict = "accepted" if result.warned else "unknown" if is_empty else "passed"
    really = _counted(result.failed, result.unknown, really)
    if result.verdict != really or result.result != _RESULTS[really]:
        raise _contradiction(result.verdict, really)
    return result


def _counted(
    failed: Sequence[str], unknown: Sequence[_Reason], otherwise: GateVerdict
) -> GateVerdict:
    """The verdict, counted again from the tests: a verdict alone could claim anything."""
    if set(failed) - {x.test for x in unknown}:
        return "failed"
    return "unknown" if failed or unknown else otherwise


def _contradiction(verdict: str, really: str) -> RecordInvalid:
    message = f"the verdict is {verdict}, but its tests amount to {really}"
    return RecordInvalid(f"test result: {message}")


def run_statements(
    image: str, digest: str, runs: Sequence[ImageRun], when: Moment | None = None
) -> dict[str, Statement]:
    """A statement for each run, by a name that a file can have."""
    return {
        "-".join(["run", run.kind, *([run.recipe] if run.recipe else [])]): make_statement(
            image, digest, TEST_RESULT, run_predicate(run), when
        )
        for run in runs
    }


def run_predicate(run: ImageRun) -> dict[str, Any]:
    """A run as the predicate of a statement."""
    reasons: dict[TestVerdict, list[_Reason]] = {}
    for test in sorted(run.tests, key=lambda t: t.name):
        # only a judged test may have no reason
        why = plain(test.message) or ("" if test.verdict in ("passed", "failed") else "not said")
        reasons.setdefault(test.verdict, []).append(_Reason(test=plain(test.name), why=why))
    passed, failed = reasons.get("passed", []), reasons.get("failed", [])
    unknown = reasons.get("unknown", [])
    if run.verdict == "unknown" and not unknown:
        unknown = [_Reason(test=run.about, why="no test was run")]
    address: dict[str, Any] = {}
    if run.kind in OF_ADDRESS:
        # not given at all to other runs: their statements stay the same bytes
        why = "the server was named by its address, which does not say what it runs"
        address = {"sm120_behind": dict.fromkeys(BEHIND, unknown_reason(why))}
    predicate = RunResult(
        result="PASSED" if run.verdict == "passed" else "FAILED",
        configuration=_inputs(run.inputs),
        passedTests=[x.test for x in passed],
        warnedTests=[],
        failedTests=sorted(x.test for x in [*failed, *unknown]),
        sm120_run=run.kind,
        sm120_recipe=run.recipe,
        sm120_lastGood=plain(run.last_good) if run.last_good else None,
        sm120_verdict=run.verdict,
        sm120_unknown=unknown,
        sm120_skipped=reasons.get("skipped", []),
        sm120_why=sorted((x for x in [*passed, *failed] if x.why), key=lambda x: x.test),
        sm120_machine={name: plain(value) for name, value in run.machine.items()},
        sm120_madeBy={name: plain(value) for name, value in run.made_by.items()},
        **address,
    )
    return predicate.model_dump(mode="json", by_alias=True, exclude_unset=True)


def read_run_result(predicate: dict[str, Any]) -> RunResult:
    """A run's result that does not contradict itself."""
    result = as_model(RunResult, predicate, "test result", "the predicate")
    really = _counted(result.failed, result.unknown, "passed" if result.passed else "unknown")
    if result.verdict != really or (result.result == "PASSED") != (really == "passed"):
        raise _contradiction(result.verdict, really)
    problem, rung = "", f"{result.last_good}: "
    if (result.kind in OF_RECIPE) != (result.recipe is not None):
        problem = "a run of a recipe's server has a recipe, and no other run has one"
    elif (set(result.behind or ()) == set(BEHIND)) != (result.kind in OF_ADDRESS):
        why = f"says why {', '.join(BEHIND)} are not known, and no other run does"
        problem = f"a run of an address {why}"
    elif result.last_good is None:
        if result.kind in LADDERS and result.verdict == "passed":
            problem = "a ladder passed, but no rung of it is named"
    elif result.kind not in LADDERS:
        problem = "only a ladder has rungs"
    # the rung that it claims must have passed tests, and none that failed
    elif any(test.startswith(rung) for test in result.failed) or not any(
        test.startswith(rung) for test in result.passed
    ):
        problem = f"the tests of rung {result.last_good} did not pass"
    if problem:
        raise RecordInvalid(f"test result: {problem}")
    return result
