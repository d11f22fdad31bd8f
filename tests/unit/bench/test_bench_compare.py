"""No winner where trials do not decide, and a gate that passes only what it can see."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.model import sha256_of
from pipeline.serving.bench.metrics import DEFINITIONS, t_quantile
from pipeline.serving.bench.model import BenchRun, CellResult, Mark, Trial
from pipeline.serving.bench.record import read_run
from pipeline.serving.bench.results.compare import (
    GATED,
    NumberChange,
    Side,
    SideCell,
    change_of,
    compare_runs,
    is_judged,
    judge_gate,
    read_side,
    side_of,
)
from tests.unit.bench.example_run import FOLDER

FOREIGN = Path(__file__).parent / "foreign_results"


def _side(**values: list[float]) -> Side:
    cell = SideCell(load="same", values={k.replace("__", "."): v for k, v in values.items()})
    return Side(
        name="a", program="sm120 bench", digest=sha256_of(b""), inputs={}, cells={"c1": cell}
    )


def _number(first: list[float], second: list[float], name: str = "output_tok_s") -> NumberChange:
    key = name.replace(".", "__")
    (found,) = compare_runs(_side(**{key: first}), _side(**{key: second})).numbers()
    return found[1]


def _with_first_cell(run: BenchRun, cell: CellResult) -> BenchRun:
    return run.model_copy(update={"cells": [cell, *run.cells[1:]]})


def test_intervals_that_do_not_touch_name_a_winner() -> None:
    number = _number([100.0, 101.0, 99.0], [120.0, 121.0, 119.0])
    assert (number.verdict, number.why) == ("better", "")
    assert number.change is not None
    assert number.change.percent == 20.0


def test_less_is_better_for_times() -> None:
    assert _number([100, 101, 99], [120, 121, 119], "ttft_ms.p99").verdict == "worse"
    assert _number([120, 121, 119], [100, 101, 99], "tpot_ms.mean").verdict == "better"


def test_intervals_that_overlap_name_none_however_far_the_means_are() -> None:
    number = _number([100.0, 140.0, 60.0], [120.0, 160.0, 80.0])
    assert (number.verdict, number.why) == ("undecided", "not surely more than 10 % apart")


@pytest.mark.parametrize(
    ("first", "second"), [([100.0], [200.0, 201.0]), ([100.0, 101.0], [200.0])]
)
def test_one_trial_names_none(first: list[float], second: list[float]) -> None:
    number = _number(first, second)
    assert number.verdict == "undecided"
    assert "one trial" in number.why
    assert number.change is not None
    assert number.change.low is None


def test_the_change_has_the_interval_of_welch() -> None:
    # variances 1 and 4, three trials each: se = sqrt(5/3), df = 2.94, so t of 2 degrees
    change = change_of([99.0, 100.0, 101.0], [108.0, 110.0, 112.0])
    assert change is not None
    assert change.percent == 10.0
    assert change.high == pytest.approx(10.0 + 4.303 * (5 / 3) ** 0.5, abs=0.001)
    assert change_of([0.0, 0.0], [1.0, 1.0]) is None


def test_a_run_against_itself_has_no_winner_and_no_changed_input() -> None:
    side = read_side(FOLDER)
    comparison = compare_runs(side, side)
    assert comparison.inputs == []
    assert {number.verdict for _, number in comparison.numbers()} == {"undecided"}


def test_changed_inputs_are_named() -> None:
    run = read_run(FOLDER)
    inputs = run.inputs.model_copy(update={"image": sha256_of(b"new")})
    server = run.server.model_copy(update={"settings": {"tp": "8"}})
    other = run.model_copy(update={"inputs": inputs, "server": server})
    changes = compare_runs(side_of(run, "a"), side_of(other, "b")).inputs
    named = {c.name: (c.first, c.second) for c in changes}
    assert named == {"image": ("", sha256_of(b"new")), "server.settings.tp": ("", "8")}


def test_which_kernels_ran_comes_first() -> None:
    run = read_run(FOLDER)
    update = {"kernels": ["Using A attention backend", "Using B MoE"], "image": sha256_of(b"new")}
    other = run.model_copy(update={"inputs": run.inputs.model_copy(update=update)})
    changes = compare_runs(side_of(run, "a"), side_of(other, "b")).inputs
    assert [c.name for c in changes] == ["kernels", "image"]
    assert changes[0].second == "Using A attention backend; Using B MoE"
    same = side_of(other, "b")
    assert compare_runs(side_of(other, "a"), same).inputs == []


def _faster(run: BenchRun, **cell_changes: object) -> BenchRun:
    """The first cell with ten times the output throughput in every trial."""
    result = run.cells[0]
    trials = [_scaled(trial) for trial in result.trials]
    cell = result.cell.model_copy(update=cell_changes)
    return _with_first_cell(run, result.model_copy(update={"trials": trials, "cell": cell}))


def _scaled(trial: Trial) -> Trial:
    output = trial.metrics.output_tok_s * 10
    return trial.model_copy(
        update={"metrics": trial.metrics.model_copy(update={"output_tok_s": output})}
    )


def _output(first: BenchRun, second: BenchRun) -> NumberChange:
    numbers = compare_runs(side_of(first, "a"), side_of(second, "b")).numbers()
    return next(n for cell, n in numbers if (cell, n.name) == ("c1", "output_tok_s"))


def test_cells_that_asked_for_different_things_have_no_winner() -> None:
    run = read_run(FOLDER)
    assert _output(run, _faster(run)).verdict == "better"
    other = _output(run, _faster(run, requests=7))
    assert (other.verdict, other.why) == ("undecided", "the two cells asked for different things")


def test_prompts_of_another_kind_are_another_load() -> None:
    run = read_run(FOLDER)
    prompts = run.workload.prompts.model_copy(update={"unique": False})
    changed = {"workload": run.workload.model_copy(update={"prompts": prompts})}
    assert "different things" in _output(run, _faster(run).model_copy(update=changed)).why


def test_a_name_and_more_repeats_are_the_same_load() -> None:
    run = read_run(FOLDER)
    renamed = run.workload.model_copy(update={"name": "other", "repeats": 9})
    assert _output(run, _faster(run).model_copy(update={"workload": renamed})).verdict == "better"


def _longer(run: BenchRun, **times: float) -> BenchRun:
    """The first cell with other real lengths, which were asked for alike."""
    result = run.cells[0]

    def longer(trial: Trial) -> Trial:
        values = {name: round(getattr(trial.metrics, name) * by) for name, by in times.items()}
        return trial.model_copy(update={"metrics": trial.metrics.model_copy(update=values)})

    trials = [longer(trial) for trial in result.trials]
    return _with_first_cell(run, result.model_copy(update={"trials": trials}))


@pytest.mark.parametrize(
    ("name", "times", "why"),
    [
        ("input_tokens", 1.22, "prompts of the second have 22 % more tokens"),
        ("input_tokens", 0.87, "prompts of the second have 13 % fewer tokens"),
        ("output_tokens", 0.5, "answers of the second have 50 % fewer tokens"),
    ],
)
def test_prompts_or_answers_of_another_real_length_name_no_winner(
    name: str, times: float, why: str
) -> None:
    run = read_run(FOLDER)
    other = _longer(_faster(run), **{name: times})
    number = _output(run, other)
    assert (number.verdict, number.why) == ("undecided", why)
    (change,) = compare_runs(side_of(run, "a"), side_of(other, "b")).inputs
    kind = "prompt" if name == "input_tokens" else "answer"
    assert change.name == f"c1: tokens of each {kind}"
    rows = judge_gate(compare_runs(side_of(run, "a"), side_of(other, "b")), 5.0, ["output_tok_s"])
    assert rows[0].verdict == "undecided"


def test_lengths_that_differ_a_little_are_the_same_work() -> None:
    run = read_run(FOLDER)
    other = _longer(_faster(run), input_tokens=1.03)
    assert _output(run, other).verdict == "better"
    assert compare_runs(side_of(run, "a"), side_of(other, "b")).inputs == []


def test_a_client_that_was_the_limit_names_none() -> None:
    run = read_run(FOLDER)
    faster = _faster(run)
    mark = Mark(kind="client-limited", message="100 % of a core")
    trials = [t.model_copy(update={"marks": [mark]}) for t in faster.cells[0].trials]
    cell = faster.cells[0].model_copy(update={"trials": trials})
    assert "client was the limit" in _output(run, _with_first_cell(faster, cell)).why


def test_void_trials_do_not_count_and_are_said() -> None:
    comparison = compare_runs(read_side(FOLDER), read_side(FOLDER))
    (cell,) = [cell for cell in comparison.cells if cell.name == "c2"]
    assert "first: 1 of 6 requests failed: lost" in cell.notes
    assert cell.numbers[0].first.trials == 2


def test_two_programs_are_shown_side_by_side_without_a_winner() -> None:
    vllm, aiperf = (
        read_side(FOREIGN / name) for name in ("vllm-sweep", "profile_export_aiperf.json")
    )
    numbers = {n.name: n for _, n in compare_runs(vllm, aiperf).numbers()}
    assert {n.verdict for n in numbers.values()} == {"undecided"}
    assert numbers["ttft_ms.mean"].why == "measured by vllm bench and by aiperf"
    # equal in vLLM, and counted otherwise by aiperf
    tpot = numbers["tpot_ms.mean / inter_token_latency.avg"]
    assert tpot.why.startswith("inter_token_latency.avg counts tokens with its own tokenizer")
    assert tpot.second.mean == 38.75


def test_two_results_of_one_foreign_program_may_have_a_winner() -> None:
    cells = compare_runs(read_side(FOREIGN / "vllm-sweep"), read_side(FOREIGN / "vllm-sweep")).cells
    equal = [n for n in cells[0].numbers if n.name == "output_tok_s"]
    assert [n.why for n in equal] == ["not surely more than 10 % apart"]


def test_cells_of_one_side_only_are_named() -> None:
    other = _side(output_tok_s=[1.0, 2.0])
    renamed = other.model_copy(update={"cells": {"c2": other.cells["c1"]}})
    comparison = compare_runs(_side(output_tok_s=[1.0, 2.0]), renamed)
    assert (comparison.only_first, comparison.only_second) == (["c1"], ["c2"])


def _gate(first: list[float], second: list[float], name: str = "output_tok_s") -> str:
    key = name.replace(".", "__")
    comparison = compare_runs(_side(**{key: first}), _side(**{key: second}))
    (row,) = judge_gate(comparison, 5.0, [name])
    return row.verdict


def test_a_gate_passes_what_is_surely_not_worse() -> None:
    assert _gate([100.0, 101.0, 99.0], [100.5, 101.0, 100.0]) == "passed"
    assert _gate([100.0, 101.0, 99.0], [150.0, 151.0, 149.0]) == "passed"
    # within what is allowed, and surely so
    assert _gate([100.0, 100.1, 99.9], [98.0, 98.1, 97.9]) == "passed"


def test_a_gate_stops_what_is_surely_worse() -> None:
    assert _gate([100.0, 101.0, 99.0], [80.0, 81.0, 79.0]) == "worse"
    assert _gate([10.0, 10.1, 9.9], [12.0, 12.1, 11.9], "tpot_ms.mean") == "worse"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([100.0], [50.0]),  # one trial
        ([100.0, 101.0, 99.0], [50.0]),
        ([100.0, 140.0, 60.0], [90.0, 130.0, 50.0]),  # too noisy to see five percent
        ([100.0, 100.4, 99.6], [95.0, 95.4, 94.6]),  # just at the border
        ([0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_what_a_gate_cannot_see_is_never_passed(first: list[float], second: list[float]) -> None:
    assert _gate(first, second) == "undecided"


def test_a_gate_misses_cells_and_numbers_that_are_gone() -> None:
    first = _side(output_tok_s=[100.0, 101.0])
    gone = first.model_copy(update={"cells": {}})
    rows = judge_gate(compare_runs(first, gone), 5.0, GATED)
    assert [(row.cell, row.verdict) for row in rows] == [("c1", "undecided")]
    rows = judge_gate(compare_runs(first, first), 5.0, ["ttft_ms.mean"])
    assert [row.verdict for row in rows] == ["undecided"]


def test_more_failed_requests_are_worse_at_any_speed() -> None:
    first = _side(failed=[0.0, 0.0], output_tok_s=[100.0, 101.0, 99.0])
    second = _side(failed=[1.0, 1.0], output_tok_s=[200.0, 201.0, 199.0])
    assert [
        row.verdict for row in judge_gate(compare_runs(first, second), 5.0, ["output_tok_s"])
    ] == [
        "worse",
        "passed",
    ]


def test_a_gate_over_different_loads_is_undecided() -> None:
    run = read_run(FOLDER)
    comparison = compare_runs(side_of(run, "a"), side_of(_faster(run, requests=7), "b"))
    rows = [row for row in judge_gate(comparison, 5.0, ["output_tok_s"]) if row.cell == "c1"]
    assert [row.verdict for row in rows] == ["undecided"]


NAMES = [
    name if part is None else f"{name}.{part}"
    for name in DEFINITIONS
    if is_judged(name)
    for part in ((None,) if not name.endswith("_ms") else ("mean", "p50", "p90", "p95", "p99"))
][:33]


def _drawn(
    noise: random.Random, trials: int, drift: Callable[[int], float], ahead: float = 0.0
) -> dict[str, list[float]]:
    """Trials of one server: its numbers drift together, and each errs a little by itself."""
    return {
        name: [
            100 * (1 + ahead) * (1 + drift(at)) * (1 + noise.gauss(0, 0.003))
            for at in range(trials)
        ]
        for name in NAMES
    }


def _winners(first: dict[str, list[float]], second: dict[str, list[float]], turns: str) -> int:
    sides = [
        _side().model_copy(
            update={"turns": turns, "cells": {"c1": SideCell(load="same", values=values)}}
        )
        for values in (first, second)
    ]
    return sum(n.verdict != "undecided" for _, n in compare_runs(sides[0], sides[1]).numbers())


@pytest.mark.share(2)
@pytest.mark.parametrize("trials", [3, 8])
@pytest.mark.parametrize("in_turns", [False, True])
def test_one_server_measured_twice_with_drift_names_a_winner_in_five_of_a_hundred_at_most(
    trials: int, in_turns: bool
) -> None:
    noise, wrong, rounds = random.Random(7), 0, 40
    for _ in range(rounds):
        if in_turns:
            steps = [noise.gauss(0, 0.01) for _ in range(trials)]
            first, second = (_drawn(noise, trials, steps.__getitem__) for _ in range(2))
        else:
            # all trials of a run share its drift, so that more of them do not show it
            first, second = (
                _drawn(noise, trials, [noise.gauss(0, 0.01)].__mul__(trials).__getitem__)
                for _ in range(2)
            )
        wrong += _winners(first, second, "same" if in_turns else "") > 0
    assert wrong / rounds <= 0.05


def test_a_server_that_is_ahead_wins_also_in_turns() -> None:
    noise = random.Random(7)
    steps = [noise.gauss(0, 0.01) for _ in range(8)]
    first = _drawn(noise, 8, steps.__getitem__)
    second = _drawn(noise, 8, steps.__getitem__, ahead=0.03)
    assert _winners(first, second, "same") == len(NAMES)
    # not in turns, nobody knows whether that is drift
    assert _winners(first, second, "") == 0
    further = _drawn(noise, 8, lambda at: 0.0, ahead=0.15)
    assert _winners(_drawn(noise, 8, lambda at: 0.0), further, "") == len(NAMES)


@pytest.mark.parametrize(
    ("doubt", "freedom", "t"),
    [(0.05, 1, 12.706), (0.05, 2, 4.303), (0.05, 9, 2.262), (0.01, 4, 4.604), (0.001, 20, 3.850)],
)
def test_the_quantiles_of_student_are_those_of_the_tables(
    doubt: float, freedom: int, t: float
) -> None:
    assert t_quantile(doubt, freedom) == pytest.approx(t, abs=0.001)


def test_answers_that_end_early_win_nothing_by_it() -> None:
    values = {
        "latency_ms.mean": [100.0, 100.1],
        "requests_s": [10.0, 10.1],
        "tpot_ms.mean": [5.0, 5.1],
    }
    quick = {name: [v * 0.5 for v in each] for name, each in values.items()}
    cells = [
        SideCell(load="same", values=values, lengths={"answer": 128.0}),
        SideCell(load="same", values=quick, lengths={"answer": 125.0}),
    ]
    one, other = (_side().model_copy(update={"cells": {"c1": cell}}) for cell in cells)
    found = {number.name: number for _, number in compare_runs(one, other, least=0).numbers()}
    for name in ("latency_ms.mean", "requests_s"):
        assert found[name].verdict == "undecided"
        assert found[name].why.startswith("answers have 128.0 tokens and 125.0")
    assert found["tpot_ms.mean"].why != found["requests_s"].why
