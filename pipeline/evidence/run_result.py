"""Runs of an image as in-toto test results, written and read back: starts and smoke ladders.

Failures are stated like successes. The format has no `unknown`: such tests count as failed there,
and `sm120_unknown` has the reason for each. What was skipped is neither passed nor failed.
https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from pipeline.attest.names import TEST_RESULT
from pipeline.attest.statement import DigestSet, Moment, Statement, make_statement
from pipeline.attest.strict import as_model, plain
from pipeline.errors import RecordInvalid
from pipeline.evidence.runs import Run, RunKind, RunTest, RunVerdict, TestVerdict, summary_of
from pipeline.known import Unknown
from pipeline.known import unknown as unknown_reason
from pipeline.model import Frozen, Name

_PASSED: Literal["PASSED"] = "PASSED"
_FAILED: Literal["FAILED"] = "FAILED"
# What a smoke of a recipe names by digest, and a smoke of an address cannot know.
BEHIND = ("image", "weights", "recipe")


class _Input(Frozen):
    name: str
    digest: DigestSet


class _Reason(Frozen):
    test: str
    why: str


class RunResult(Frozen):
    """in-toto's test result, with what our runs add."""

    result: Literal["PASSED", "FAILED"]
    configuration: list[_Input]
    passed: list[str] = Field(alias="passedTests")
    warned: list[str] = Field(alias="warnedTests", max_length=0)
    failed: list[str] = Field(alias="failedTests")
    kind: RunKind = Field(alias="sm120_run")
    recipe: Name | None = Field(alias="sm120_recipe")
    last_good: str | None = Field(alias="sm120_lastGood")
    verdict: RunVerdict = Field(alias="sm120_verdict")
    unknown: list[_Reason] = Field(alias="sm120_unknown")
    skipped: list[_Reason] = Field(alias="sm120_skipped")
    why: list[_Reason] = Field(alias="sm120_why")
    machine: dict[str, str] = Field(alias="sm120_machine")
    made_by: dict[str, str] = Field(alias="sm120_madeBy")
    # of an address alone: why each of `BEHIND` is not known
    behind: dict[Literal["image", "weights", "recipe"], Unknown] | None = Field(
        default=None, alias="sm120_behind"
    )
    recorded: Moment | None = Field(default=None, alias="sm120_recorded")

    def summary(self) -> str:
        """How far the image was proved by it, for people."""
        return summary_of(self.kind, self.recipe, self.verdict, self.last_good)


def run_statements(
    image: str, digest: str, runs: Sequence[Run], when: Moment | None = None
) -> dict[str, Statement]:
    """A statement for each run, by a name that a file can have."""
    return {
        "-".join(["run", run.kind, *([run.recipe] if run.recipe else [])]): make_statement(
            image, digest, TEST_RESULT, run_predicate(run), when
        )
        for run in runs
    }


def run_predicate(run: Run) -> dict[str, Any]:
    """A run as the predicate of a statement."""
    unknown = _reasons(run, "unknown")
    if run.verdict == "unknown" and not unknown:
        unknown = [_Reason(test=run.about, why="no test was run")]
    why = unknown_reason("the server was named by its address, which does not say what it runs")
    # not given at all to other runs: their statements stay the same bytes
    behind: dict[str, Any] = (
        {"sm120_behind": dict.fromkeys(BEHIND, why)} if run.kind == "address" else {}
    )
    predicate = RunResult(
        result=_PASSED if run.verdict == "passed" else _FAILED,
        configuration=[
            _Input(name=name, digest=DigestSet(sha256=digest.removeprefix("sha256:")))
            for name, digest in sorted(run.inputs.items())
        ],
        passedTests=[x.test for x in _reasons(run, "passed")],
        warnedTests=[],
        failedTests=sorted(x.test for x in [*_reasons(run, "failed"), *unknown]),
        sm120_run=run.kind,
        sm120_recipe=run.recipe,
        sm120_lastGood=plain(run.last_good) if run.last_good else None,
        sm120_verdict=run.verdict,
        sm120_unknown=unknown,
        sm120_skipped=_reasons(run, "skipped"),
        sm120_why=sorted(
            [x for v in _JUDGED for x in _reasons(run, v) if x.why], key=lambda x: x.test
        ),
        sm120_machine={name: plain(value) for name, value in run.machine.items()},
        sm120_madeBy={name: plain(value) for name, value in run.made_by.items()},
        **behind,
    )
    # the time is added where statements keep it: `sm120_recorded` is not written as null
    return predicate.model_dump(mode="json", by_alias=True, exclude_unset=True)


_JUDGED: tuple[TestVerdict, ...] = ("passed", "failed")


def _reasons(run: Run, verdict: TestVerdict) -> list[_Reason]:
    tests = sorted((t for t in run.tests if t.verdict == verdict), key=lambda t: t.name)
    return [_Reason(test=plain(test.name), why=_why(test)) for test in tests]


def _why(test: RunTest) -> str:
    return plain(test.message) or ("" if test.verdict in _JUDGED else "not said")


def read_run_result(predicate: dict[str, Any]) -> RunResult:
    """A run's result that does not contradict itself."""
    result = as_model(RunResult, predicate, "test result", "the predicate")
    # counted again from the tests: a verdict alone could claim anything
    unknown = {x.test for x in result.unknown}
    really: RunVerdict = "passed" if result.passed else "unknown"
    if set(result.failed) - unknown:
        really = "failed"
    elif result.failed or unknown:
        really = "unknown"
    if result.verdict != really or (result.result == _PASSED) != (really == "passed"):
        raise RecordInvalid(
            f"test result: the verdict is {result.verdict}, but its tests amount to {really}"
        )
    if (result.kind == "smoke") != (result.recipe is not None):
        raise RecordInvalid("test result: a smoke run has a recipe, and no other run has one")
    if (set(result.behind or ()) == set(BEHIND)) != (result.kind == "address"):
        raise RecordInvalid(
            f"test result: a smoke of an address says why {', '.join(BEHIND)} are not known, and no"
            " other run does"
        )
    _require_rung(result)
    return result


def _require_rung(result: RunResult) -> None:
    """The rung that it claims must have passed tests, and none that failed."""
    if result.last_good is None:
        if result.kind != "start" and result.verdict == "passed":
            raise RecordInvalid("test result: a ladder passed, but no rung of it is named")
        return
    rung = f"{result.last_good}: "
    is_good = any(test.startswith(rung) for test in result.passed)
    if not is_good or any(test.startswith(rung) for test in result.failed):
        raise RecordInvalid(f"test result: the tests of rung {result.last_good} did not pass")
