"""The search for faster sizes, against a worker with known times and planted faults."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.core.errors import StepFailed
from pipeline.serving.tune import trials
from pipeline.serving.tune.search import STEPS, TunedTokens, neighbours, tune_tokens
from pipeline.serving.tune.trials import Config, Journal, TrialWorker, TuneTrial
from tests.unit.tune import paced_worker

BEST = {**paced_worker.BEST, "num_warps": 4, "num_stages": 3}
Tune = Callable[..., TunedTokens]


@pytest.fixture
def tune(tmp_path: Path) -> Iterator[Tune]:
    """Tunes against the paced worker; `asked` has a line for each trial that was really made."""
    (tmp_path / "faults").write_text("{}")
    files = [str(tmp_path / name) for name in ("faults", "asked")]
    command = [sys.executable, paced_worker.__file__, *files]
    with (tmp_path / "errors").open("wb") as errors:
        worker = TrialWorker(command, dict(os.environ), errors)

        def run(tokens: int = 16, most: int = 60, **options: object) -> TunedTokens:
            journal = Journal(tmp_path / "trials.jsonl")
            journal.read()
            given = {"judge": lambda configs: [*configs], "seeds": [], **options}
            return tune_tokens(worker, journal, tokens, most=most, **given)  # type: ignore[arg-type]

        yield run
        worker.stop()


def asked(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def plant(tmp_path: Path, **faults: str) -> None:
    (tmp_path / "faults").write_text(
        json.dumps({k.replace("__", "="): v for k, v in faults.items()})
    )


def test_the_best_sizes_are_found_by_steps_and_measured_again(tune: Tune, tmp_path: Path) -> None:
    row = tune()
    assert row.config == BEST
    assert row.default == paced_worker.DEFAULT
    # 100 µs, against 10 % more for each of eight steps
    assert row.ratio is not None
    assert row.ratio.mean == pytest.approx(1 / 1.8, abs=1e-4)
    assert (row.default_us, row.us) == pytest.approx((180.18, 100.1), abs=0.02)
    assert row.trials <= 60
    assert asked(tmp_path)[-1]["repeats"] == 30


def test_no_more_trials_than_allowed(tune: Tune, tmp_path: Path) -> None:
    assert tune(most=7).trials == 7
    # the engine's own, seven, and the best of them again
    assert len(asked(tmp_path)) == 9


def test_where_nothing_is_faster_the_engine_s_own_stays(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, tried="wrong")
    row = tune()
    assert not row.is_faster
    assert row.config == paced_worker.DEFAULT
    assert row.failed == row.trials > 0


@pytest.mark.parametrize("fault", ["wrong", "nan", "fails", "untimed", "garbage", "exits"])
def test_a_fault_costs_a_trial_and_its_sizes_are_never_chosen(
    tune: Tune, tmp_path: Path, fault: str
) -> None:
    plant(tmp_path, BLOCK_SIZE_N__128=fault)
    row = tune()
    assert row.failed > 0
    assert row.is_faster
    assert row.config["BLOCK_SIZE_N"] != 128


@pytest.mark.parametrize("fault", ["hangs", "endless"])
def test_a_worker_that_hangs_or_never_ends_its_answer_is_stopped(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(trials, "_START_LIMIT_S", 1.0)
    # the limit is bound to the method's default
    monkeypatch.setattr(TrialWorker.ask, "__defaults__", (0.5,))
    plant(tmp_path, num_warps__8=fault)
    row = tune(most=12)
    assert row.failed >= 1
    assert row.config["num_warps"] == 4


def test_a_second_run_asks_nothing(tune: Tune, tmp_path: Path) -> None:
    first, count = tune(), len(asked(tmp_path))
    assert tune() == first
    assert len(asked(tmp_path)) == count


def test_half_a_line_of_a_killed_run_costs_one_trial(tune: Tune, tmp_path: Path) -> None:
    first, count = tune(), len(asked(tmp_path))
    path = tmp_path / "trials.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    assert tune() == first
    assert len(asked(tmp_path)) == count + 1
    # the half line and the whole one after it are told apart
    assert tune() == first
    assert len(asked(tmp_path)) == count + 1


def test_what_the_gate_refuses_is_never_tried(tune: Tune, tmp_path: Path) -> None:
    def judge(configs: Sequence[Config]) -> list[Config]:
        return [each for each in configs if each["BLOCK_SIZE_K"] <= 64]

    row = tune(judge=judge)
    assert row.config["BLOCK_SIZE_K"] == 64
    tried = [each["config"] for each in asked(tmp_path) if each["config"]]
    assert all(config["BLOCK_SIZE_K"] <= 64 for config in tried)  # type: ignore[index]


def test_what_did_well_for_other_tokens_is_tried_first(tune: Tune, tmp_path: Path) -> None:
    assert tune(most=1, seeds=[BEST]).config == BEST


def test_a_card_that_is_slowed_down_gets_time_and_then_ends_the_run(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("pipeline.serving.tune.trials.time.sleep", waits.append)
    plant(tmp_path, num_warps__8="hot")
    with pytest.raises(StepFailed, match="slows the card down") as raised:
        tune()
    assert "kept" in raised.value.hint
    assert waits == [30.0, 60.0, 120.0, 0.0]
    # no time of a hot card is kept
    assert '"Active"' not in (tmp_path / "trials.jsonl").read_text()


def test_without_the_engine_s_own_time_nothing_can_be_compared(tune: Tune, tmp_path: Path) -> None:
    plant(tmp_path, default="fails")
    with pytest.raises(StepFailed, match="own choice for 16 tokens was not timed: RuntimeError"):
        tune()
    # and once it can be timed, an earlier failure stands in nobody's way
    plant(tmp_path)
    stopped = asked(tmp_path)
    assert [each["config"] for each in stopped] == [None]
    assert not (tmp_path / "trials.jsonl").exists()


@pytest.fixture
def shaky(tmp_path: Path) -> Iterator[Callable[..., TrialWorker]]:
    """Makes a worker that is lost where a file `down` is, as `docker run` without its daemon."""
    (tmp_path / "faults").write_text("{}")
    paced = [
        sys.executable,
        paced_worker.__file__,
        str(tmp_path / "faults"),
        str(tmp_path / "asked"),
    ]
    # answers so many requests, then it is gone, with `down` in place or without
    script = """
import pathlib, subprocess, sys
down, count, *paced = sys.argv[1:]
if pathlib.Path(down).exists():
    sys.exit("docker: Cannot connect to the Docker daemon.\\n\\nRun 'docker run --help' for more")
inner = subprocess.Popen(paced, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for number, line in enumerate(sys.stdin.buffer):
    if number == int(count):
        pathlib.Path(down).touch()
    if number >= abs(int(count)):
        inner.kill()
        sys.exit(137)
    inner.stdin.write(line)
    inner.stdin.flush()
    sys.stdout.buffer.write(inner.stdout.readline())
    sys.stdout.buffer.flush()
"""
    workers = []
    with (tmp_path / "errors").open("wb") as errors:

        def make(count: int, **options: object) -> TrialWorker:
            command = [sys.executable, "-c", script, str(tmp_path / "down"), str(count), *paced]
            workers.append(TrialWorker(command, dict(os.environ), errors, **options))  # type: ignore[arg-type]
            return workers[-1]

        yield make
        for worker in workers:
            worker.stop()


def tune_with(worker: TrialWorker, tmp_path: Path, most: int = 60) -> TunedTokens:
    journal = Journal(tmp_path / "trials.jsonl")
    journal.read()
    return tune_tokens(worker, journal, 16, judge=lambda c: [*c], seeds=[], most=most)


def test_a_lost_container_engine_ends_the_run_and_spoils_no_later_one(
    shaky: Callable[..., TrialWorker], tmp_path: Path
) -> None:
    with pytest.raises(StepFailed, match=r"Cannot connect to the Docker daemon\.$") as raised:
        tune_with(shaky(3), tmp_path)
    assert "kept" in raised.value.hint
    kept = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [trial["failed"] for trial in kept] == ["", "", ""]
    (tmp_path / "down").unlink()
    row = tune_with(shaky(1000), tmp_path)
    assert (row.config, row.failed) == (BEST, 0)


def test_a_worker_that_is_lost_now_and_then_is_asked_once_more(
    shaky: Callable[..., TrialWorker], tmp_path: Path
) -> None:
    row = tune_with(shaky(-5), tmp_path)
    assert (row.config, row.failed) == (BEST, 0)


def test_a_card_without_memory_ends_the_run_and_spoils_no_later_one(
    tune: Tune, tmp_path: Path
) -> None:
    tune(most=1)
    count = len((tmp_path / "trials.jsonl").read_text().splitlines())
    plant(tmp_path, all="fails")
    with pytest.raises(StepFailed, match="after it the engine's own choice: RuntimeError: CUDA"):
        tune()
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == count
    plant(tmp_path)
    assert tune().config == BEST


def test_the_last_measurement_fails_loudly_and_is_asked_again(tune: Tune, tmp_path: Path) -> None:
    plant(tmp_path, repeats__30="fails")
    with pytest.raises(StepFailed, match="ran, and failed when it was measured again") as raised:
        tune()
    assert "all trials but this one are kept" in raised.value.hint
    plant(tmp_path)
    assert tune().config == BEST


def test_what_a_worker_left_running_is_removed_before_the_next_one_starts(
    shaky: Callable[..., TrialWorker], tmp_path: Path
) -> None:
    log = tmp_path / "removed"
    remove = ["sh", "-c", f"echo $(cat {tmp_path / 'asked'} | wc -l) >> {log}"]
    (tmp_path / "asked").touch()
    worker = shaky(-2, remove=remove)
    tune_with(worker, tmp_path, most=4)
    worker.stop()
    # before the first trial too: a run that was killed may have left one
    assert log.read_text().split()[:3] == ["0", "2", "2"]


def test_a_removal_that_hangs_is_given_up(
    shaky: Callable[..., TrialWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_REMOVE_LIMIT_S", 0.1)
    worker = shaky(10, remove=["sleep", "1000"])
    assert worker.ask({"tokens": 1, "config": None, "repeats": 1})["id"] == 1


def test_an_outlier_makes_no_time_negative(tune: Tune, tmp_path: Path) -> None:
    plant(tmp_path, tried="outlier")
    row = tune()
    assert row.ratio is not None
    assert row.ratio.low == 1e-6
    assert row.ratio.high is not None
    assert row.ratio.high < 0.99


@pytest.mark.parametrize(
    "changes",
    [
        {"error": float("nan")},
        {"error": None},
        {"error": 0.03},
        {"default_us": [0.0, 1.0]},
        {"default_us": [float("nan"), 1.0]},
        {"tried_us": [float("inf"), 1.0]},
        {"tried_us": [-1.0, 1.0]},
        {"tried_us": [1.0]},
        {"tried_us": [1.0], "default_us": [1.0]},
        {"tried_us": [], "default_us": []},
    ],
)
def test_times_that_are_none_are_refused(changes: dict[str, object]) -> None:
    sound = {"tokens": 1, "config": BEST, "repeats": 2, "error": 0.0}
    sound |= {"default_us": [1.0, 1.0], "tried_us": [0.5, 0.5]}
    assert not TuneTrial.model_validate(sound).refused
    assert TuneTrial.model_validate({**sound, **changes}).refused


def test_neighbours_differ_in_one_size_by_one_step() -> None:
    found = [*neighbours(BEST)]
    assert len(found) == len({tuple(sorted(each.items())) for each in found})
    for each in found:
        (name,) = (name for name in BEST if each[name] != BEST[name])
        steps = STEPS[name]
        assert abs(steps.index(each[name]) - steps.index(BEST[name])) == 1
