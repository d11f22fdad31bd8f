"""Verdicts: what passes, what fails, and that unknown is never passed."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.images.gate.smem.cases import AcceptedKernel, KernelCase
from pipeline.images.gate.smem.limits import CARDS, card_for
from pipeline.images.gate.smem.results import (
    CaseResult,
    Record,
    WorkerAnswer,
    judge_case,
    overall_of_cases,
)

CARD = card_for("sm_120")
LIMIT = CARD.shared_bytes


def case(**changes: Any) -> KernelCase:
    return KernelCase.model_validate(
        {
            "gate": "smem-decode",
            "name": "decode-8",
            "stands_for": ["a model"],
            "function": ["engine.ops:decode"],
            "arguments": {},
            "optional": [],
            "kernels": ["_fwd"],
            "spill_free": [],
            "timeout_s": 10,
            **changes,
        }
    )


def record(shared: int | None = 1000, **changes: Any) -> Record:
    return Record.model_validate(
        {"kernel": "_fwd", "module": "engine.ops", "shared_bytes": shared, **changes}
    )


def judged(
    *records: Record, accepted: int = 0, ended: str = "called", **changes: Any
) -> CaseResult:
    known = AcceptedKernel(
        kernel="_fwd",
        case="decode",
        most_bytes=accepted or 1,
        reason="known upstream, being fixed",
        upstream=["https://example.org/1"],
    )
    answer = WorkerAnswer.model_validate({"case": "decode-8", "ended": ended, "records": records})
    return judge_case(case(**changes), answer, CARD, [known] if accepted else [], cached=False)


def test_the_limits_are_those_of_nvidias_tables() -> None:
    small, large = ("sm_120", "sm_121", "sm_89", "sm_86"), ("sm_100", "sm_90")
    assert {CARDS[a].shared_bytes for a in small} == {101376}
    assert {CARDS[a].shared_bytes for a in large} == {232448}
    assert CARDS["sm_120"].capability == (12, 0)
    assert CARDS["sm_90"].capability == (9, 0)


def test_exactly_the_limit_fits_and_one_byte_more_does_not() -> None:
    assert judged(record(LIMIT)).verdict == "passed"
    assert judged(record(LIMIT + 1)).verdict == "failed"


def test_the_words_of_a_failure_name_kernel_and_need() -> None:
    assert judged(record(106496)).message == "_fwd needs 106496 bytes"


def test_a_known_kernel_is_accepted_up_to_its_size_and_no_further() -> None:
    assert judged(record(102400), accepted=102400).verdict == "accepted"
    assert judged(record(102401), accepted=102400).verdict == "failed"


def test_what_is_accepted_for_one_kernel_is_not_for_another() -> None:
    other = record(102400, kernel="_other")
    assert judged(record(), other, accepted=102400).verdict == "failed"


def test_an_autotuned_kernel_fails_only_if_no_configuration_fits() -> None:
    small, big = record(1000, group="_fwd#0"), record(200000, group="_fwd#0")
    result = judged(big, small)
    assert result.verdict == "passed"
    assert [k.verdict for k in result.kernels] == ["spare", "fits"]
    assert judged(big, record(150000, group="_fwd#0")).verdict == "failed"


def test_a_configuration_of_another_autotuner_helps_nobody() -> None:
    assert judged(record(200000, group="a#0"), record(1000, group="b#1")).verdict == "failed"


@pytest.mark.parametrize("ended", ["function gone", "stopped", "raised", "died", "timed out"])
def test_a_case_that_did_not_end_well_is_unknown_even_if_all_it_compiled_fits(ended: str) -> None:
    assert judged(record(), ended=ended).verdict == "unknown"
    assert judged(ended=ended).verdict == "unknown"


def test_over_the_limit_is_a_failure_however_the_case_ended() -> None:
    assert judged(record(200000), ended="raised").verdict == "failed"


def test_a_call_that_compiled_nothing_is_unknown() -> None:
    assert judged().verdict == "unknown"


def test_a_kernel_that_was_expected_and_not_seen_makes_the_case_unknown() -> None:
    result = judged(record(kernel="_other"))
    assert result.verdict == "unknown"
    assert "_fwd was not compiled" in result.message


def test_a_kernel_that_does_not_compile_makes_the_case_unknown() -> None:
    result = judged(record(), record(None, kernel="_two", error="CompilationError: at 3:1"))
    assert result.verdict == "unknown"
    assert "CompilationError" in result.message


def test_spills_fail_where_the_case_forbids_them() -> None:
    assert judged(record(spill_bytes=28)).verdict == "passed"
    assert judged(record(spill_bytes=28), spill_free=["_fwd"]).verdict == "failed"
    assert judged(record(spill_bytes=0), spill_free=["_fwd"]).verdict == "passed"
    assert judged(record(spill_bytes=None), spill_free=["_fwd"]).verdict == "unknown"


def test_one_failure_outweighs_one_unknown_outweighs_all_that_passed() -> None:
    passed, unknown, failed = judged(record()), judged(), judged(record(200000))
    accepted = judged(record(102400), accepted=102400)
    assert overall_of_cases([passed, unknown, failed]) == "failed"
    assert overall_of_cases([passed, accepted, unknown]) == "unknown"
    assert overall_of_cases([passed, accepted]) == "accepted"
    assert overall_of_cases([passed, passed]) == "passed"


def test_no_cases_at_all_is_unknown() -> None:
    assert overall_of_cases([]) == "unknown"


def test_words_of_the_assembler_are_kept_without_the_paths_of_this_machine() -> None:
    message = "ptxas fatal : Value 'sm_121a' is not defined Repro command: /tmp/x/ptxas /tmp/y.ptx"
    answer = WorkerAnswer(case="one", ended="raised", message=message)
    result = judge_case(case(), answer, CARDS["sm_121"], [], cached=False)
    assert result.verdict == "unknown"
    assert result.message == "ptxas fatal : Value 'sm_121a' is not defined"


def test_a_kernel_that_needs_nothing_is_shown_with_its_zero() -> None:
    worst = judged(record(0)).worst
    assert worst is not None
    assert worst.record.shared_bytes == 0


@pytest.mark.parametrize(
    ("accepted", "names"),
    [
        ("decode-8", ["decode-8"]),
        ("decode", ["decode", "decode-8", "decode-8-16"]),
        (["prefill", "decode"], ["decode", "prefill-64"]),
        (None, ["decode", "anything-at-all"]),
    ],
)
def test_what_is_accepted_is_meant_by_its_name_or_as_one_of_its_sizes(
    accepted: str | list[str] | None, names: list[str]
) -> None:
    assert all(accepting(accepted).covers(name) for name in names)


@pytest.mark.parametrize(
    ("accepted", "name"),
    [
        ("decode", "decode-fp8"),
        ("decode", "decode-fp8-8"),
        ("decode", "decode8"),
        ("decode", "decoder"),
        ("decode", "decode-"),
        ("decode", "decode-8x"),
        ("decode", "a-decode"),
        ("decode-8", "decode"),
        ("decode-8", "decode-88"),
        ("decode-8", "decode-16"),
        ("d.code", "decode"),
        (["decode", "prefill"], "extend-8"),
        ([], "decode"),
        ("", "decode"),
    ],
)
def test_another_case_is_not_accepted_along_with_it(accepted: str | list[str], name: str) -> None:
    assert not accepting(accepted).covers(name)
    answer = WorkerAnswer.model_validate(
        {"case": name, "ended": "called", "records": [record(LIMIT + 1)]}
    )
    result = judge_case(case(name=name), answer, CARD, [accepting(accepted)], cached=False)
    assert result.verdict == "failed"


def accepting(case: str | list[str] | None) -> AcceptedKernel:
    return AcceptedKernel(
        kernel="_fwd",
        case=case,
        most_bytes=LIMIT + 1,
        reason="known upstream, being fixed",
        upstream=["https://example.org/1"],
    )


def test_a_kernel_that_triton_compiles_wrong_has_failed_although_it_fits() -> None:
    wrong = record(1000, faults=["a multi-CTA kernel ends early (triton#11730)"])
    answer = WorkerAnswer.model_validate(
        {"case": "decode-8", "ended": "called", "records": [wrong], "versions": {"triton": "3.8.0"}}
    )
    result = judge_case(case(), answer, card_for("sm_120"), [], cached=False)
    assert result.verdict == "failed"
    assert "Triton 3.8.0: a multi-CTA kernel ends early (triton#11730)" in result.message


# printed by the ptxas of Triton 3.5.1 for a gather through a tensor descriptor
REFUSED = (
    "PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas"
    " /tmp/tmpovh545a2.ptx, line 70; error   : Feature '.tile::gather4 with destination state"
    " space as .shared::cluster' not supported on .target 'sm_120a'\n"
)


def test_an_instruction_that_the_card_lacks_has_failed_by_its_name() -> None:
    result = judged(record(None, error=REFUSED), ended="raised")
    assert result.verdict == "failed"
    assert result.message.startswith("_fwd uses .tile::gather4 with destination state space as")
    assert result.message.endswith("which sm_120a lacks")
    alloc = "Instruction 'tcgen05.alloc' not supported on .target 'sm_120a'"
    assert (
        judged(record(None, error=alloc)).message == "_fwd uses tcgen05.alloc, which sm_120a lacks"
    )


@pytest.mark.parametrize(
    "error",
    [
        "PTXASError: ptxas fatal   : Memory allocation failure",
        "CompilationError: at 3:4: descriptor block shape must have at least 16 bytes",
        "NotImplementedError: Must use persistent kernel and be TMA-compliant for native MXFP",
    ],
)
def test_any_other_error_of_the_compiler_stays_unknown(error: str) -> None:
    assert judged(record(None, error=error)).verdict == "unknown"


def test_an_instruction_that_one_of_several_configurations_uses_does_not_fail_the_others() -> None:
    spare = record(None, error=REFUSED, group="tuned#0")
    assert judged(spare, record(1000, group="tuned#0")).verdict == "passed"


def test_a_kernel_over_the_limit_is_named_with_what_it_relies_on() -> None:
    large = judged(record(LIMIT + 1, uses=["persistent", "TMA"]))
    assert large.message == f"_fwd (persistent, TMA) needs {LIMIT + 1} bytes"
    assert judged(record(LIMIT + 1)).message == f"_fwd needs {LIMIT + 1} bytes"
    assert judged(record(1000, uses=["persistent", "TMA"])).verdict == "passed"
