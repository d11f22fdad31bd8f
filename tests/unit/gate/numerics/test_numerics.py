"""Numbers: what is right, what is wrong, and that unknown is neither."""

from __future__ import annotations

import math
from typing import Any, cast
from unittest import mock

import pytest

from pipeline.images.gate import numerics
from pipeline.images.gate.numerics import TOLERANCES, check_numbers
from pipeline.images.gate.patches import PatchVerdict, unproved, with_numbers
from pipeline.images.gate.smem.cases import KernelCase
from pipeline.images.gate.smem.results import NumericsResult, NumericsResults, WorkerAnswer
from pipeline.images.gate.smem.run import GateTarget
from tests.unit.gate.smem.test_results import case as make_case
from tests.unit.gate.smem.test_results import record

ALLOWED = TOLERANCES["bfloat16"][0]
NUMERICS = {"reference": "decode-attention", "outputs": ["o"], "rounds_to": "bfloat16", "seed": 1}


def case(**changes: Any) -> KernelCase:
    return make_case(numerics={**NUMERICS, **changes})


def computed(share: float | None = 0.001, **changes: Any) -> dict[str, Any]:
    return {"output": "o", "elements": 64, "unwritten": 0, "max_share": share, **changes}


def answer(*found: dict[str, Any], ended: str = "called", **changes: Any) -> WorkerAnswer:
    report = {"case": "decode-8", "ended": ended, "computed": found, "records": [record(None)]}
    return WorkerAnswer.model_validate({**report, **changes})


def results(
    *answers: WorkerAnswer, of: KernelCase | None = None, cached: bool = False
) -> NumericsResults:
    asked = of or case()
    known = [(asked, each, cached) for each in answers]
    with mock.patch.object(numerics, "answered", return_value=known):
        return check_numbers(cast(GateTarget, None), [asked] * len(answers))


def judged(*found: dict[str, Any], ended: str = "called", **changes: Any) -> NumericsResult:
    return results(answer(*found, ended=ended, **changes)).cases[0]


def test_a_number_within_the_tolerance_is_right_and_beyond_it_is_wrong() -> None:
    assert judged(computed(ALLOWED)).verdict == "right"
    assert judged(computed(math.nextafter(ALLOWED, 1.0))).verdict == "wrong"
    assert "o is off by 0.5" in judged(computed(0.5)).message


def test_a_number_that_was_never_written_is_wrong() -> None:
    result = judged(computed(None, unwritten=3))
    assert (result.verdict, result.message) == ("wrong", "3 of 64 numbers of o are missing")
    assert judged(computed(0.0, unwritten=1)).verdict == "wrong"
    assert judged(computed(None)).verdict == "wrong"


@pytest.mark.parametrize("share", [math.nan, math.inf])
def test_a_share_that_is_no_number_is_not_right(share: float) -> None:
    assert judged(computed(share)).verdict == "wrong"


def test_an_output_that_was_not_compared_is_unknown() -> None:
    assert judged().verdict == "unknown"
    assert judged(computed(output="lse")).verdict == "unknown"
    assert judged(computed(elements=0)).verdict == "unknown"


def test_one_wrong_output_is_enough() -> None:
    both = make_case(numerics={**NUMERICS, "outputs": ["o", "lse"]})
    (verdict,) = results(answer(computed(), computed(0.5, output="lse")), of=both).cases
    assert (verdict.verdict, verdict.message[:11]) == ("wrong", "lse is off ")


@pytest.mark.parametrize("ended", ["function gone", "stopped", "raised", "died", "timed out"])
def test_a_call_that_did_not_end_well_is_unknown_whatever_it_computed(ended: str) -> None:
    assert judged(computed(0.0), ended=ended).verdict == "unknown"


def test_numbers_that_another_kernel_computed_are_unknown() -> None:
    result = judged(computed(0.0), records=[record(None, kernel="_other")])
    assert (result.verdict, result.message) == ("unknown", "_fwd was not run by this call")
    assert judged(computed(0.0), records=[]).verdict == "unknown"


def test_one_wrong_case_outweighs_one_unknown_outweighs_all_that_are_right() -> None:
    right, wrong, unknown = answer(computed()), answer(computed(9.0)), answer()
    assert results(right, unknown, wrong).verdict == "wrong"
    assert results(right, unknown).verdict == "unknown"
    assert results(right, right).verdict == "right"
    assert results().verdict == "unknown"


def test_every_tolerance_is_small_and_says_why() -> None:
    for allowed, reason in TOLERANCES.values():
        assert 0 < allowed <= 2**-3
        assert len(reason) > 20


def test_a_patch_whose_kernel_computes_something_else_is_wrong_and_not_for_a_build() -> None:
    state, message = with_numbers(
        "needed", "fits", results(answer(computed()), answer(computed(9)))
    )
    assert state == "wrong"
    assert message.startswith("decode-8: o is off by 9")
    verdict = PatchVerdict(patch="p", gate="smem", version="1", state=state, message=message)
    assert unproved([verdict]) == [verdict]


def test_numbers_that_are_not_known_prove_no_patch() -> None:
    assert with_numbers("needed", "fits", results(answer()))[0] == "unknown"
    assert with_numbers("needed", "fits", results())[0] == "unknown"


def test_right_numbers_leave_a_verdict_as_it_was() -> None:
    assert with_numbers("needed", "fits", results(answer(computed()))) == ("needed", "fits")
    assert with_numbers("needed", "fits", None) == ("needed", "fits")


def test_a_call_that_writes_beside_its_output_is_wrong_although_its_numbers_are_right() -> None:
    result = judged(computed(0.0, outside=48))
    assert (result.verdict, result.message) == (
        "wrong",
        "48 numbers outside of o were written over",
    )
    assert judged(computed(0.0, outside=0)).verdict == "right"


def test_adding_up_in_16_bits_is_allowed_for_attention_and_not_for_mixtures() -> None:
    assert TOLERANCES["bfloat16 result"][0] < TOLERANCES["bfloat16"][0]
    assert "16 bits is within that" in TOLERANCES["bfloat16"][1]
    assert "16 bits is further off" in TOLERANCES["bfloat16 result"][1]
