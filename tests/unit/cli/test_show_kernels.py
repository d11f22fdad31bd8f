"""How a run of the shared-memory gate looks on the terminal."""

from __future__ import annotations

import pytest

from pipeline.cli.gate_tables import show_kernels, show_numbers
from pipeline.core.verdict import GateVerdict
from pipeline.images.gate.smem.results import CaseResult, GateResult
from tests.unit.cli.test_show_numbers import result
from tests.unit.gate.numerics.test_numerics import answer, computed, results
from tests.unit.support import ROOT, Command


def case(name: str, verdict: GateVerdict, message: str = "", cached: bool = False) -> CaseResult:
    return CaseResult(
        gate="smem-all", name=name, stands_for=[], verdict=verdict, message=message, cached=cached
    )


def run_of(*cases: CaseResult) -> GateResult:
    return result(None).model_copy(update={"cases": list(cases)})


MIXED = run_of(
    case("fits", "passed"),
    case("forgiven", "accepted", "known upstream"),
    case("large", "failed", "_fwd needs 106496 bytes"),
    case("lost", "unknown", "the worker died"),
    case("larger", "failed", "_fwd needs 131072 bytes"),
    case("fits-too", "passed"),
)


def lines(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line]


def test_what_failed_stands_first_in_the_table_and_last_below_it() -> None:
    first = lines(show_kernels(MIXED))
    assert first[2:8] == ["large", "larger", "lost", "forgiven", "fits", "fits-too"]
    assert first[8:12] == ["forgiven:", "lost:", "large:", "larger:"]


def test_only_what_failed_or_is_unknown_is_listed_and_all_is_counted() -> None:
    shown = show_kernels(MIXED, only_failed=True)
    assert lines(shown)[2:8] == ["large", "larger", "lost", "lost:", "large:", "larger:"]
    assert "2 passed, 1 accepted, 2 failed, 1 unknown" in shown
    assert "fits" not in shown


def test_where_nothing_failed_only_the_counts_are_left() -> None:
    shown = show_kernels(run_of(case("fits", "passed")), only_failed=True)
    assert "tiny on sm_120: 1 passed" in shown
    assert "verdict" not in shown


def test_wrong_numbers_stand_first_and_alone_where_only_they_are_asked_for() -> None:
    mixed = result(results(answer(computed(0.0)), answer(), answer(computed(0.5))))
    verdicts = [line.split()[2] for line in show_numbers(mixed).splitlines()[3:6]]
    assert verdicts == ["wrong", "unknown", "right"]
    failed = show_numbers(mixed, only_failed=True)
    assert [line.split()[2] for line in failed.splitlines()[3:5]] == ["wrong", "unknown"]
    assert "1 right, 1 wrong, 1 unknown" in failed


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([True, True], "2 passed in 0.0 s, all judged before"),
        ([True, False], "2 passed in 0.0 s, 1 judged before"),
        ([False, False], "2 passed in 0.0 s\n"),
    ],
)
def test_a_run_says_how_much_of_it_was_judged_before(kept: list[bool], said: str) -> None:
    cases = [case(f"case-{i}", "passed", cached=cached) for i, cached in enumerate(kept)]
    assert said in show_kernels(run_of(*cases))


def test_numbers_that_were_computed_before_say_so() -> None:
    before = results(answer(computed(0.0)), cached=True)
    assert show_numbers(result(before)).endswith("1 right in 0.0 s, all judged before")
    assert "before" not in show_numbers(result(results(answer(computed(0.0)))))


@pytest.mark.parametrize("other", ["--json", "--discover"])
def test_only_failed_is_refused_where_there_is_no_table_of_verdicts(
    sm120: Command, other: str
) -> None:
    ended = sm120("--checkout", ROOT, "gate", "run", "vllm", "--only-failed", other)
    assert "--only-failed is about the tables of verdicts" in ended.err


def test_what_passed_is_counted_and_one_note_stands_once_for_all_its_cases() -> None:
    note = "known upstream"
    cases = [case(f"same-{i}", "accepted", note) for i in range(3)]
    shown = show_kernels(run_of(case("fits", "passed"), *cases), hide_passed=True)
    assert shown.count(note) == 1
    assert "same-0, same-1, same-2: known upstream" in shown
    assert "fits" not in shown
    assert "1 passed, 3 accepted" in shown
