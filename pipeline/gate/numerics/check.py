"""Do the kernels compute the right thing? Each case's result beside a float64 reference.

Triton's interpreter runs the engine's own code on the CPU, with the block sizes that the engine
chooses for the card. It knows no registers and no shared memory, so this does not judge fit;
the other gates do that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.gate.numerics.cases import read_numeric_cases
from pipeline.gate.smem.case_spec import Rounding
from pipeline.gate.smem.cases import Case
from pipeline.gate.smem.image_gate import ImageGate, chosen_cases
from pipeline.gate.smem.results import (
    GateResult,
    NumericsResult,
    NumericsResults,
    NumericsVerdict,
    WorkerAnswer,
    unanswered,
)
from pipeline.gate.smem.run import GateTarget, answered
from pipeline.gate.worker.interpreter import REPAIRS

# How far a result may be off, as a share of the sum of magnitudes it is the sum of, and why.
TOLERANCES: dict[Rounding, tuple[float, str]] = {
    "bfloat16": (
        2.0**-7,
        "every probability and the result are rounded to bfloat16, half a unit (2^-8) each;"
        " adding up in 16 bits is within that, and shows in a case with float32 inputs",
    ),
    "bfloat16 result": (
        2.0**-8,
        "a float32 sum, and a result that is rounded once to bfloat16 (2^-9 of itself); adding up"
        " in 16 bits is further off",
    ),
    "bfloat16 scores": (
        2.0**-5,
        "the scores too are multiplied and added up in bfloat16, which shifts every probability",
    ),
    "float8 probabilities": (
        2.0**-3,
        "every probability is rounded to fp8: by 2^-4 of itself, and by 2^-10 where it is small",
    ),
    "float32": (2.0**-14, "sums of a few hundred float32 products, each rounded at 2^-24"),
}


def numeric_cases(gate: ImageGate) -> list[Case]:
    """The cases of an image that are also run for their numbers."""
    return read_numeric_cases(gate.context.checkout, gate.plan.spec.name, gate.gates)


def add_numbers(
    gate: ImageGate, result: GateResult, *, unpatched: bool = False, only: str | None = None
) -> GateResult:
    """A run of the shared-memory gate, with what the same kernels compute."""
    target = gate.target(gate.tree if unpatched else gate.patched(), result.card)
    numbers = check_numbers(target, chosen_cases(numeric_cases(gate), only))
    return result.model_copy(update={"numerics": numbers})


def check_numbers(target: GateTarget, cases: Sequence[Case]) -> NumericsResults:
    """Every case's numbers."""
    start = time.monotonic()
    answers = answered(target, cases)
    results = [judge_numbers(case, answer, cached=cached) for case, answer, cached in answers]
    return NumericsResults(
        verdict=overall_numbers(results),
        # all workers are in one environment, so all answers name the same versions
        versions={k: v for _, answer, _ in answers for k, v in answer.versions.items()},
        repairs=REPAIRS,
        cases=results,
        seconds=round(time.monotonic() - start, 3),
    )


def judge_numbers(case: Case, answer: WorkerAnswer, *, cached: bool) -> NumericsResult:
    """The verdict on one case's numbers."""
    assert case.numerics is not None
    tolerance, reason = TOLERANCES[case.numerics.rounds_to]
    verdict, message = _verdict(case, answer, tolerance)
    return NumericsResult(
        gate=case.gate,
        name=case.name,
        stands_for=case.stands_for,
        reference=case.numerics.reference,
        verdict=verdict,
        message=message,
        tolerance=tolerance,
        reason=reason,
        computed=answer.computed,
        launches=answer.records,
        seconds=answer.seconds,
        cached=cached,
        base=case.base,
    )


def _verdict(case: Case, answer: WorkerAnswer, tolerance: float) -> tuple[NumericsVerdict, str]:
    assert case.numerics is not None
    if answer.ended != "called":
        return "unknown", unanswered(case, answer)
    missing = set(case.kernels) - {record.kernel for record in answer.records}
    if missing:
        return "unknown", f"{', '.join(sorted(missing))} was not run by this call"
    compared = {computed.output: computed for computed in answer.computed}
    for output in case.numerics.outputs:
        got = compared.get(output)
        if got is None or not got.elements:
            return "unknown", f"{output} was not compared"
        if got.outside:
            return "wrong", f"{got.outside} numbers outside of {output} were written over"
        if got.unwritten or got.max_share is None:
            return "wrong", f"{got.unwritten} of {got.elements} numbers of {output} are missing"
        # NaN compares as false: only what is known to be near is right
        if not got.max_share <= tolerance:
            return "wrong", f"{output} is off by {got.max_share:.3g}, allowed are {tolerance:.3g}"
    return "right", ""


def overall_numbers(cases: Sequence[NumericsResult]) -> NumericsVerdict:
    """The verdict on all cases together; none at all is unknown."""
    verdicts = {case.verdict for case in cases}
    if "wrong" in verdicts:
        return "wrong"
    return "right" if verdicts == {"right"} else "unknown"
