"""Trials of several starts of an engine: what the interval covers, and who wins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.app.bench import changed_workload
from pipeline.core.errors import NumberChanged, WorkloadInvalid
from pipeline.core.net.wire import Address
from pipeline.serving.bench.metrics import independent_numbers, intervals
from pipeline.serving.bench.model import BenchRun, Inputs, Trial
from pipeline.serving.bench.record import read_run, workload_digest, write_run
from pipeline.serving.bench.results.compare import NumberChange, compare_runs, side_of
from pipeline.serving.bench.results.recompute import require_as_measured
from pipeline.serving.bench.runner import Bench
from pipeline.serving.bench.server import MeasuredServer
from pipeline.serving.bench.stub import Pacing
from pipeline.serving.bench.workload import Workload, read_workload
from tests.testbed.bench_faults import bench_server
from tests.unit.bench.example_run import FOLDER


def _trials(*speeds: tuple[int | None, float]) -> list[Trial]:
    """A trial for each start and output speed."""
    one = read_run(FOLDER).cells[0].trials[0]
    return [
        one.model_copy(
            update={
                "number": number,
                "start": start,
                "metrics": one.metrics.model_copy(update={"output_tok_s": speed}),
            }
        )
        for number, (start, speed) in enumerate(speeds)
    ]


def _run(*speeds: tuple[int | None, float]) -> BenchRun:
    run, trials = read_run(FOLDER), _trials(*speeds)
    cell = run.cells[0].model_copy(update={"trials": trials, "intervals": intervals(trials)})
    return run.model_copy(update={"cells": [cell]})


def _winner(first: BenchRun, second: BenchRun, least: float | None = None) -> NumberChange:
    numbers = {
        number.name: number
        for _, number in compare_runs(side_of(first, "a"), side_of(second, "b"), least).numbers()
    }
    return numbers["output_tok_s"]


def test_each_start_counts_once_however_many_trials_it_has() -> None:
    trials = _trials((0, 100.0), (0, 102.0), (1, 105.0), (1, 107.0))
    assert [each["output_tok_s"] for each in independent_numbers(trials)] == [101.0, 106.0]
    found = intervals(trials)["output_tok_s"]
    assert (found.mean, found.trials) == (103.5, 2)
    # the two starts are 5 % apart, and two of them say little of a third
    assert found.low is not None
    assert found.low < 75


def test_without_starts_each_trial_counts() -> None:
    found = intervals(_trials((None, 100.0), (None, 102.0), (None, 104.0)))["output_tok_s"]
    assert (found.mean, found.trials) == (102.0, 3)


def test_trials_of_one_start_have_no_interval() -> None:
    assert intervals(_trials((0, 100.0), (0, 102.0)))["output_tok_s"].low is None


_ONE = [(None, speed) for speed in (100.0, 100.1, 99.9)]
_OTHER = [(None, speed) for speed in (107.0, 107.1, 106.9)]


def test_one_start_each_names_no_winner_within_what_two_starts_may_differ() -> None:
    number = _winner(_run(*_ONE), _run(*_OTHER))
    assert (number.verdict, number.why) == ("undecided", "not surely more than 10 % apart")
    # one who knows better says so
    assert _winner(_run(*_ONE), _run(*_OTHER), 5.0).verdict == "better"


@pytest.mark.parametrize("several", ["first", "second"])
def test_several_starts_of_one_side_are_not_enough(several: str) -> None:
    many = _run((0, 100.0), (1, 100.1), (2, 99.9))
    pair = (many, _run(*_OTHER)) if several == "first" else (_run(*_OTHER), many)
    assert _winner(*pair).verdict == "undecided"


def test_several_starts_of_both_name_a_winner() -> None:
    first = _run((0, 100.0), (1, 100.1), (2, 99.9))
    second = _run((0, 107.0), (1, 107.1), (2, 106.9))
    assert _winner(first, second).verdict == "better"


def test_starts_that_differ_name_none_though_their_trials_agree() -> None:
    # each start is steady, and the same image is 4 to 5 % apart
    first = _run((0, 100.0), (0, 100.1), (1, 104.5), (1, 104.6))
    second = _run((0, 104.4), (0, 104.5), (1, 109.0), (1, 109.1))
    number = _winner(first, second)
    assert (number.verdict, number.why) == ("undecided", "not surely more than 5 % apart")


def test_a_far_winner_needs_no_starts() -> None:
    fast = [(None, speed) for speed in (150.0, 150.1, 149.9)]
    assert _winner(_run(*_ONE), _run(*fast)).verdict == "better"


@pytest.mark.parametrize(
    ("repeats", "starts", "total"), [(None, 3, 3), (None, 2, 4), (6, 3, 6), (None, 1, 3)]
)
def test_repeats_are_shared_by_the_starts(repeats: int | None, starts: int, total: int) -> None:
    found = changed_workload(read_workload("quick"), repeats=repeats, starts=starts)
    assert (found.repeats, found.engine_starts) == (total, starts)


@pytest.mark.parametrize(
    ("name", "repeats", "message", "hint"),
    [
        ("quick", 4, "4 repeats cannot be shared by 3 starts", "multiple of --starts, such as 6"),
        ("start", None, "starts the engine itself", "Leave --starts out"),
    ],
)
def test_repeats_that_cannot_be_shared_are_refused(
    name: str, repeats: int | None, message: str, hint: str
) -> None:
    with pytest.raises(WorkloadInvalid, match=message) as refused:
        changed_workload(read_workload(name), repeats=repeats, starts=3)
    assert hint in refused.value.hint


def test_a_file_that_shares_badly_is_refused() -> None:
    value = {**read_workload("quick").model_dump(), "engine_starts": 2}
    with pytest.raises(ValidationError, match="without a rest"):
        Workload.model_validate(value)


@pytest.fixture
def engine() -> Iterator[list[str]]:
    """Addresses of engines, a new one for each start; the second is slower."""
    with ExitStack() as stack:
        paces = [Pacing(0.01, tpot) for tpot in (0.002, 0.02, 0.002, 0.002)]
        yield [stack.enter_context(bench_server("", pace)).url for pace in paces]


def _bench(urls: list[str], folder: Path, **more: Any) -> Bench:
    workload = Workload.model_validate(
        {
            "name": "small",
            "summary": "A few short requests",
            "input": {"kind": "fixed", "tokens": 60},
            "output": {"kind": "fixed", "tokens": 6},
            "loads": [{"concurrency": n, "requests": 2} for n in (1, 2)],
            "warmup_requests": 0,
            "repeats": 2,
            "engine_starts": 2,
        }
    )
    servers = iter([MeasuredServer(Address.read(url), url) for url in urls])
    return Bench(
        server=next(servers),
        restart=lambda: next(servers),
        workload=workload,
        folder=folder,
        inputs=Inputs(workload=workload_digest(workload)),
        self_test=False,
        drain_s=0.05,
        **more,
    )


def test_each_start_has_its_share_of_every_cell(engine: list[str], tmp_path: Path) -> None:
    run = _bench(engine, tmp_path).run()
    assert [[trial.start for trial in cell.trials] for cell in run.cells] == [[0, 1], [0, 1]]
    for cell in run.cells:
        fast, slow = (trial.metrics.tpot_ms for trial in cell.trials)
        assert fast is not None
        assert slow is not None
        assert slow.mean > fast.mean
        assert cell.intervals["tpot_ms.mean"].trials == 2
    require_as_measured(tmp_path, run)


def test_a_run_that_goes_on_does_so_in_a_further_start(
    engine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(engine, tmp_path)
    whole, count = Bench._run_trial, 0

    def stopped(self: Bench, *told: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return whole(self, *told)

    monkeypatch.setattr(Bench, "_run_trial", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    monkeypatch.undo()
    run = _bench(engine[2:], tmp_path).run()
    # the first cell was measured before the second had its turn
    assert [[trial.start for trial in cell.trials] for cell in run.cells] == [[0, 2], [1, 2]]
    require_as_measured(tmp_path, run)


def test_starts_that_were_edited_away_are_found(engine: list[str], tmp_path: Path) -> None:
    run = _bench(engine, tmp_path).run()
    trials = [trial.model_copy(update={"start": 0}) for trial in run.cells[0].trials]
    cell = run.cells[0].model_copy(update={"trials": trials, "intervals": intervals(trials)})
    write_run(tmp_path, run.model_copy(update={"cells": [cell, *run.cells[1:]]}))
    with pytest.raises(NumberChanged, match="1 starts of the engine, the workload has 2"):
        require_as_measured(tmp_path, read_run(tmp_path))
