"""Whole runs against a server on loopback that is sound, or has one fault."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import (
    BenchNotMeasured,
    BenchUnanswered,
    NumberChanged,
    RunInvalid,
    StoreUnwritable,
    WorkloadInvalid,
)
from pipeline.core.model import sha256_of
from pipeline.core.net.wire import Address
from pipeline.serving.bench import runner
from pipeline.serving.bench.marks import TrialChecks
from pipeline.serving.bench.metrics import energy_j, metrics_of
from pipeline.serving.bench.model import BenchRun, Inputs, RequestRow
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.serving.bench.plan import WorkerJob, cells_of
from pipeline.serving.bench.record import (
    measured_alone,
    read_request_rows,
    read_run,
    workload_digest,
    write_run,
)
from pipeline.serving.bench.results.compare import compare_runs, read_side
from pipeline.serving.bench.runner import (
    Bench,
    measure_in_turns,
)
from pipeline.serving.bench.server import MeasuredServer
from pipeline.serving.bench.worker import WorkerRun, prepared
from pipeline.serving.bench.workers import Workers, WorkerStats, start_module
from pipeline.serving.bench.workload import Workload
from tests.testbed.bench_faults import BenchServer, bench_server
from tests.unit.hosts.machines import H200

_LENGTHS = {
    "input": {"kind": "fixed", "tokens": 60},
    "output": {"kind": "fixed", "tokens": 6},
}
LIMITS = {"first_token_s": 20, "stall_s": 20, "request_s": 60, "retries": 2}


def _workload(**changes: Any) -> Workload:
    base = {
        "name": "small",
        "summary": "A few short requests",
        **_LENGTHS,
        "loads": [{"concurrency": 2, "requests": 8}],
        "warmup_requests": 0,
        "repeats": 1,
        "limits": LIMITS,
    }
    return Workload.model_validate({**base, **changes})


def _bench(server: BenchServer, folder: Path, workload: Workload, **changes: Any) -> Bench:
    return Bench(
        server=MeasuredServer(Address.read(server.url), server.url),
        workload=workload,
        folder=folder,
        inputs=Inputs(workload=workload_digest(workload)),
        self_test=False,
        sample_every_s=0.05,
        drain_s=0.05,
        **changes,
    )


class _HereWorkers:
    """The work of the worker processes, done here: a process takes a second to start."""

    def __init__(self, jobs: list[WorkerJob]) -> None:
        self.jobs = jobs
        self.efforts: list[WorkerStats] = []

    def __enter__(self) -> _HereWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def rows(self, progress: object = None) -> Iterator[RequestRow]:
        for job in self.jobs:
            share = asyncio.run(self._share(job))
            self.efforts.append(WorkerStats(0.0, 1.0, 0.0, share.unsent))
            yield from share.rows()

    async def _share(self, job: WorkerJob) -> WorkerRun:
        share, todo = await prepared(job)
        share.origin = time.monotonic()
        await share.run(iter(todo))
        return share


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Workers", _HereWorkers)


@pytest.fixture
def measured(tmp_path: Path, here: None) -> Callable[..., tuple[BenchRun, list[RequestRow]]]:
    """A run of one trial against a server with a fault, and its requests."""

    def measure(fault: str = "", **changes: Any) -> tuple[BenchRun, list[RequestRow]]:
        with bench_server(fault) as server:
            run = _bench(server, tmp_path, _workload(**changes)).run()
        return run, list(read_request_rows(tmp_path, run.cells[0].trials[0].requests))

    return measure


Measured = Callable[..., tuple[BenchRun, list[RequestRow]]]


def test_a_sound_server_is_measured(measured: Measured) -> None:
    run, rows = measured()
    trial = run.cells[0].trials[0]
    assert (run.state, run.cells[0].state, trial.void) == ("complete", "good", [])
    assert trial.metrics.completed == 8
    assert trial.metrics.output_tokens == 48
    assert {row.number for row in rows} == set(range(8))
    assert {mark.kind for mark in trial.marks} == {"client-unmeasured"}
    assert run.server.engine == "stub"


def test_prompts_have_the_asked_length_by_the_servers_count(measured: Measured) -> None:
    _, rows = measured()
    assert all(abs((row.input_tokens or 0) - 60) <= 2 for row in rows)


@pytest.fixture
def with_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that answers as it did on a machine with an H200."""
    text = json.loads(H200.read_bytes())["commands"]["nvidia-smi"]["out"]
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "answer.xml").write_text(text)
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\nexec cat '{programs}/answer.xml'\n")
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serving.bench.server.shutil.which", lambda name: None)


@pytest.mark.parametrize("card", ["with_a_card", "without_a_card"])
def test_what_is_kept_is_what_was_computed(
    request: pytest.FixtureRequest, measured: Measured, tmp_path: Path, card: str
) -> None:
    request.getfixturevalue(card)
    run, rows = measured()
    trial = run.cells[0].trials[0]
    energy = energy_j(trial.samples.gpus)
    assert (energy is None) == (card == "without_a_card")
    assert metrics_of(rows, energy_j=energy) == trial.metrics
    assert read_run(tmp_path) == run


def test_no_two_prompts_are_alike_not_even_of_two_trials(tmp_path: Path, here: None) -> None:
    with bench_server() as server:
        _bench(server, tmp_path, _workload(repeats=2, warmup_requests=3)).run()
        bodies = server.world.bodies
    assert len(bodies) == len(set(bodies)) == 19
    # after the settings, which are the same
    starts = {body.partition(b'"content": "')[2][:14] for body in bodies}
    assert len(starts) == len(bodies)


def test_two_runs_share_no_prompt(tmp_path: Path, here: None) -> None:
    with bench_server() as server:
        for name in ("one", "two"):
            _bench(server, tmp_path / name, _workload()).run()
        bodies = server.world.bodies
    assert len(bodies) == len(set(bodies)) == 16


def test_connections_are_used_again(tmp_path: Path, here: None) -> None:
    with bench_server() as server:
        _bench(server, tmp_path, _workload(loads=[{"concurrency": 2, "requests": 40}])).run()
        # two streams; the others ask small things between trials
        assert server.world.connections < 20


@pytest.mark.parametrize("fault", ["closes", "closes-silently"])
def test_a_server_that_closes_after_each_answer_is_no_failure(
    measured: Measured, fault: str
) -> None:
    run, rows = measured(fault)
    assert run.cells[0].state == "good"
    # it never saw those that came too late, so that they were not refused
    assert [row.retries for row in rows] == [0] * 8


@pytest.mark.parametrize(
    ("fault", "kind", "count"),
    [
        ("stalls", "stalled", 1),
        ("endless", "malformed", 1),
        ("malformed", "malformed", 1),
        ("not-http", "malformed", 1),
        ("cut", "lost", 1),
        ("cut-done", "lost", 1),
        ("surplus", "malformed", 1),
        ("comments", "stalled", 1),
        ("empty-deltas", "stalled", 1),
        ("empty", "empty", 1),
        ("error-event", "refused", 1),
        ("always-busy", "refused", 8),
        ("silent", "stalled", 8),
    ],
)
def test_a_failed_stream_voids_its_cell_and_is_counted(
    measured: Measured, fault: str, kind: str, count: int
) -> None:
    # all at a time: each waits for its limit
    short = {"first_token_s": 2.5, "stall_s": 1.5} if kind == "stalled" else {}
    run, rows = measured(
        fault, loads=[{"concurrency": 8, "requests": 8}], limits={**LIMITS, **short}
    )
    cell = run.cells[0]
    assert cell.state == "void"
    assert kind in cell.trials[0].void[0]
    assert [row.failure for row in rows if row.failure] == [kind] * count
    assert cell.trials[0].metrics.failed == count
    assert cell.trials[0].metrics.completed == 8 - count
    assert cell.intervals == {}


def test_an_answer_without_an_end_is_ended(measured: Measured) -> None:
    # long before the time that a whole answer may take
    _, rows = measured("endless", limits={"request_s": 7200})
    (row,) = [row for row in rows if row.failure]
    assert row.message.startswith("no end: ")
    assert row.message.endswith(" events for 6 tokens")


def test_of_a_void_trial_no_number_is_shown(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    measured("malformed")
    shown = capsys.readouterr().err
    assert "void: 1 of 8 requests failed: malformed" in shown
    assert "output tok/s" not in shown


def test_a_server_that_dies_leaves_a_partial_run_with_what_it_did(
    tmp_path: Path, here: None
) -> None:
    with bench_server("dies") as server, pytest.raises(BenchUnanswered) as caught:
        _bench(server, tmp_path, _workload(loads=[{"concurrency": 2, "requests": 200}])).run()
    assert "the server went away during c2, trial 1: no server listens" in str(caught.value)
    assert "0 trials before it are kept" in str(caught.value)
    assert "Serve it again, then run the same command" in caught.value.hint
    run = read_run(tmp_path)
    trial = run.cells[0].trials[0]
    assert (run.state, run.cells[0].state) == ("partial", "void")
    assert "no server listens" in run.why_partial
    assert trial.metrics.completed >= 5
    # most were not even tried: nobody was there
    assert trial.metrics.requests < 100
    assert "not sent" in trial.void[-1]


def test_refused_requests_are_tried_again_and_the_wait_counts(measured: Measured) -> None:
    run, rows = measured("busy")
    trial = run.cells[0].trials[0]
    assert run.cells[0].state == "good"
    assert [row.retries for row in rows] == [1] * 8
    assert trial.metrics.retries == 8
    assert "retried" in {mark.kind for mark in trial.marks}


@pytest.mark.parametrize("fault", ["usage-high", "usage-low"])
def test_token_counts_that_cannot_be_true_are_not_used(measured: Measured, fault: str) -> None:
    run, _ = measured(fault)
    trial = run.cells[0].trials[0]
    assert trial.metrics.output_tokens == 48
    assert "usage-disagrees" in {mark.kind for mark in trial.marks}


def test_without_token_counts_events_are_counted(measured: Measured) -> None:
    run, _ = measured("usage-none")
    assert run.cells[0].trials[0].metrics.output_tokens == 48
    assert "usage-missing" in {mark.kind for mark in run.cells[0].trials[0].marks}


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (129, ["prompts have 14 % fewer tokens than asked"]),
        (168, ["prompts have 12 % more tokens than asked"]),
        (147, []),
    ],
)
def test_prompts_of_another_length_than_asked_are_marked(tokens: int, said: list[str]) -> None:
    tally = TrialChecks(_workload())
    rows = [RequestRow(number=0, sent_s=0, asked_input=150, input_tokens=tokens, output_tokens=0)]
    assert list(tally.through(rows)) == rows
    assert [m.message for m in tally.marks() if m.kind == "input-differs"] == said


def test_one_request_is_not_called_several() -> None:
    tally = TrialChecks(_workload())
    rows = [RequestRow(number=0, sent_s=0, failure="lost", message="gone")]
    assert list(tally.through(rows)) == rows
    assert tally.void(0) == ["1 of 1 request failed: lost: gone"]


def test_short_answers_are_marked(measured: Measured) -> None:
    run, _ = measured("short")
    assert "short-answers" in {mark.kind for mark in run.cells[0].trials[0].marks}


def test_a_looping_answer_voids_its_cell_unless_the_workload_allows_it(measured: Measured) -> None:
    run, _ = measured("loops", output={"kind": "fixed", "tokens": 30})
    assert run.cells[0].state == "void"
    assert "8 of 8 answers with repeated text" in run.cells[0].trials[0].void[0]


def test_a_looping_answer_is_marked_where_it_is_allowed(measured: Measured) -> None:
    run, rows = measured("loops", output={"kind": "fixed", "tokens": 30}, looping="mark")
    assert run.cells[0].state == "good"
    assert all(row.looping for row in rows)


def test_a_server_is_measured_by_a_process(tmp_path: Path) -> None:
    with bench_server() as server:
        run = _bench(server, tmp_path, _workload()).run()
    assert run.cells[0].trials[0].metrics.completed == 8


def test_an_error_of_a_worker_is_ours(tmp_path: Path) -> None:
    prompts = {"kind": "file", "path": "missing.jsonl"}
    with bench_server() as server, pytest.raises(WorkloadInvalid, match="cannot be read"):
        _bench(server, tmp_path, _workload(prompts=prompts)).run()


def test_nobody_there_is_said(tmp_path: Path, here: None) -> None:
    with bench_server() as server:
        bench = _bench(server, tmp_path, _workload())
    with pytest.raises(BenchUnanswered, match="no server listens at the address"):
        bench.run()


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = _workload(repeats=3, warmup_requests=1)
    with bench_server() as server:
        bench = _bench(server, tmp_path, workload)
        whole = Bench._run_trial

        def stopped(self: Bench, cell: Any, number: int, progress: Any) -> Any:
            if number == 2:
                raise KeyboardInterrupt
            return whole(self, cell, number, progress)

        monkeypatch.setattr(Bench, "_run_trial", stopped)
        with pytest.raises(KeyboardInterrupt):
            bench.run()
        monkeypatch.undo()
        partial = read_run(tmp_path)
        assert (partial.state, partial.cells[0].state) == ("partial", "partial")
        assert len(partial.cells[0].trials) == 2
        assert "Ctrl-C" in partial.why_partial
        run = _bench(server, tmp_path, workload).run()
        # the server may be another by now: it is warmed up again
        assert server.world.requests == 24 + 2
    assert (run.state, run.cells[0].state, run.interruptions) == ("complete", "good", 1)
    assert run.cells[0].trials[:2] == partial.cells[0].trials
    assert run.nonce == partial.nonce
    for trial in run.cells[0].trials:
        assert len(list(read_request_rows(tmp_path, trial.requests))) == 8


def test_void_trials_are_tried_again(tmp_path: Path, here: None) -> None:
    with bench_server("malformed") as server:
        assert _bench(server, tmp_path, _workload()).run().cells[0].state == "void"
        void = (tmp_path / REQUESTS_FILE).read_bytes()
        # the fault was of its second request alone
        cell = _bench(server, tmp_path, _workload()).run().cells[0]
        bodies = server.world.bodies
    assert cell.state == "good"
    # a cell that was not good at first says so, and its failed requests stay
    (mark,) = [m for m in cell.trials[0].marks if m.kind == "repeated"]
    assert "trial 1 was void before: 1 of 8 requests failed: malformed" in mark.message
    assert (tmp_path / REQUESTS_FILE).read_bytes().startswith(void)
    assert len(list(read_request_rows(tmp_path, cell.trials[0].requests))) == 8
    # the server may have kept what it read the first time
    assert len({body.partition(b'"content": "')[2][:14] for body in bodies}) == 16


def test_a_void_trial_stays_until_it_was_repeated(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench_server("malformed") as server:
        _bench(server, tmp_path, _workload()).run()

        def stopped(*_: object) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(Bench, "_run_trial", stopped)
        with pytest.raises(KeyboardInterrupt):
            _bench(server, tmp_path, _workload()).run()
    assert read_run(tmp_path).cells[0].state == "void"


def test_a_finished_run_is_said_to_be_one_and_left_as_it_is(
    tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with bench_server() as server:
        run = _bench(server, tmp_path, _workload()).run()
        before, asked = (tmp_path / RUN_FILE).read_bytes(), server.world.requests
        capsys.readouterr()
        assert _bench(server, tmp_path, _workload()).run() == run
        assert server.world.requests == asked
    assert (tmp_path / RUN_FILE).read_bytes() == before
    said = capsys.readouterr().err
    assert "is finished: nothing is measured. --output with another folder" in said
    assert "Measuring" not in said


def test_a_folder_with_another_run_is_refused(tmp_path: Path, here: None) -> None:
    with bench_server() as server:
        _bench(server, tmp_path, _workload()).run()
        with pytest.raises(RunInvalid, match=r"a run with another workload$"):
            _bench(server, tmp_path, _workload(seed=7)).run()
        with pytest.raises(RunInvalid, match=r"another model \(.+, now other\)$"):
            _bench(server, tmp_path, _workload(), model="other").run()
        same = _bench(server, tmp_path, _workload())
        facts = same.inputs.model_copy(update={"host": "sha256:" + "a" * 64})
        with pytest.raises(RunInvalid, match=r"another host \(--host-facts\)"):
            replace(same, inputs=facts).run()


def test_what_differs_from_the_run_in_a_folder_is_named(tmp_path: Path, here: None) -> None:
    with bench_server() as server:
        run = _bench(server, tmp_path, _workload()).run()
        client = run.client.model_copy(update={"python": "2.7"})
        asked = run.server.model_copy(update={"version": "2"})
        write_run(tmp_path, run.model_copy(update={"client": client, "server": asked}))
        same = _bench(server, tmp_path, _workload())
        inputs = same.inputs.model_copy(update={"recipe": sha256_of(b"r"), "recipe_name": "r"})
        with pytest.raises(RunInvalid) as refused:
            replace(same, inputs=inputs).run()
    assert str(refused.value).partition(" a run with another ")[2].split(" and another ") == [
        "recipe",
        "version of the server (2, now None)",
        "client (python)",
    ]


def test_a_finished_run_that_was_edited_is_not_taken_for_measured(
    tmp_path: Path, here: None
) -> None:
    with bench_server() as server:
        run = _bench(server, tmp_path, _workload()).run()
        was = run.cells[0].trials[0].metrics.output_tok_s
        file = tmp_path / RUN_FILE
        file.write_text(file.read_text().replace(f'"output_tok_s":{was}', '"output_tok_s":9999.5'))
        with pytest.raises(NumberChanged, match=r"is 9999\.5, by its requests") as edited:
            _bench(server, tmp_path, _workload()).run()
    assert "--output" in edited.value.hint


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_run_whose_requests_are_damaged_is_not_gone_on_with(
    tmp_path: Path, here: None, damage: str
) -> None:
    requests = tmp_path / REQUESTS_FILE
    with bench_server() as server:
        run = _bench(server, tmp_path, _workload(repeats=2)).run()
        first = run.cells[0].trials[:1]
        cells = [run.cells[0].model_copy(update={"trials": first, "state": "partial"})]
        write_run(tmp_path, run.model_copy(update={"cells": cells, "state": "partial"}))
        data = requests.read_bytes()
        requests.unlink()
        if damage != "gone":
            changed = data.replace(b'"chunks":6', b'"chunks":7', 1)
            requests.write_bytes(data[:300] if damage == "cut" else changed)
        left, asked = sorted(tmp_path.iterdir()), server.world.requests
        with pytest.raises((NumberChanged, RunInvalid)):
            _bench(server, tmp_path, _workload(repeats=2)).run()
        # neither asked nor filled up with zeros
        assert server.world.requests == asked
    assert sorted(tmp_path.iterdir()) == left


def test_two_programs_do_not_measure_into_one_folder(tmp_path: Path, here: None) -> None:
    with bench_server() as server, measured_alone(tmp_path):
        with pytest.raises(RunInvalid, match="another `sm120 bench` is measuring into it"):
            _bench(server, tmp_path, _workload()).run()
        assert server.world.requests == 0


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(
    tmp_path: Path, here: None
) -> None:
    # root may write anywhere: a file in the way is in anybody's way
    (tmp_path / "bench").write_text("a file")
    with bench_server() as server:
        with pytest.raises(StoreUnwritable, match="Not a directory"):
            _bench(server, tmp_path / "bench" / "small", _workload()).run()
        assert server.world.requests == 0


def test_random_tokens_are_refused_with_speculation_and_where_it_is_unknown(
    tmp_path: Path,
    here: None,
) -> None:
    workload = _workload(prompts={"kind": "random-tokens", "vocabulary": 5000})
    with bench_server() as server:
        for speculates in (True, None):
            with pytest.raises(WorkloadInvalid, match="51009"):
                _bench(server, tmp_path, workload, speculates=speculates).run()
        run = _bench(server, tmp_path, workload, speculates=False).run()
    assert run.cells[0].trials[0].metrics.completed == 8


def test_more_connections_than_the_machine_allows_are_refused_at_once(
    tmp_path: Path, here: None
) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    streams = min(most, 100_000)
    loads = [{"concurrency": streams, "requests": streams}]
    if most > streams:
        pytest.skip("this machine allows any number of open files")
    with bench_server() as server:
        bench = _bench(server, tmp_path, _workload(loads=loads))
        with pytest.raises(BenchNotMeasured, match="open files"):
            bench.run()
    assert server.world.requests == 0


def test_a_conversation_carries_what_the_server_said(tmp_path: Path, here: None) -> None:
    turn = {"input": {"kind": "fixed", "tokens": 20}, "output": {"kind": "fixed", "tokens": 4}}
    prompts = {
        "kind": "conversation",
        "system_tokens": 30,
        "turns": [turn, {**turn, "role": "tool", "times": 2, "think_s": 0.01}],
    }
    loads = [{"concurrency": 2, "requests": 3}]
    with bench_server() as server:
        run = _bench(server, tmp_path, _workload(prompts=prompts, loads=loads)).run()
        last = max(server.world.bodies, key=len)
    rows = list(read_request_rows(tmp_path, run.cells[0].trials[0].requests))
    assert sorted((row.conversation, row.turn) for row in rows) == [
        (c, t) for c in range(3) for t in range(3)
    ]
    assert last.count(b'"assistant"') == 2
    assert last.count(b'"tool_calls"') == 2
    assert last.count(b'"system"') == 1
    inputs = [[r.input_tokens for r in rows if r.turn == t] for t in range(3)]
    assert max(n or 0 for n in inputs[0]) < min(n or 0 for n in inputs[2])


def test_a_rate_is_kept_and_shown(tmp_path: Path, here: None) -> None:
    loads = [{"rate_per_s": 100, "arrivals": "even", "requests": 20}]
    with bench_server() as server:
        run = _bench(server, tmp_path, _workload(loads=loads)).run()
    rows = list(read_request_rows(tmp_path, run.cells[0].trials[0].requests))
    assert [row.planned_s for row in rows] == pytest.approx([n / 100 for n in range(20)])
    assert all(row.sent_s >= (row.planned_s or 0) for row in rows)


def test_the_engines_counters_are_compared_with_the_answers(tmp_path: Path, here: None) -> None:
    with bench_server() as server:
        server.world.metrics = (
            "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
            "vllm:generation_tokens_total 100\n"
        )
        run = _bench(server, tmp_path, _workload()).run()
    trial = run.cells[0].trials[0]
    assert run.server.engine == "vllm"
    assert run.server.speculation is False
    assert trial.samples.engine is not None
    # a counter that stands still while 48 tokens are written
    assert "usage-disagrees" in {mark.kind for mark in trial.marks}
    assert trial.drained_s is not None


def test_a_server_that_others_use_is_marked(tmp_path: Path, here: None) -> None:
    with bench_server() as server:
        server.world.metrics = "vllm:num_requests_running 3\n"
        run = _bench(server, tmp_path, _workload()).run()
    assert "not-drained" in {mark.kind for mark in run.cells[0].trials[0].marks}


def test_a_worker_that_is_done_may_end_before_the_others() -> None:
    jobs: Any = [None, None]
    end = json.dumps({"end": {"cpu_s": 0.1, "wall_s": 1.0, "behind_s": 0.0, "unsent": 0}}).encode()
    ready = b'{"ready": 1}'
    with Workers([]) as workers:
        workers.jobs = jobs
        for said in [(0, ready), (1, ready), (0, end), (0, b""), (1, end)]:
            workers._messages.put(said)
        assert list(workers.rows()) == []
    assert len(workers.efforts) == 2


def test_several_workers_share_the_requests(tmp_path: Path) -> None:
    with bench_server() as server:
        bench = _bench(server, tmp_path, _workload())
        bench.workers = 2
        run = bench.run()
    rows = list(read_request_rows(tmp_path, run.cells[0].trials[0].requests))
    assert {row.worker for row in rows} == {0, 1}
    assert sorted(row.number for row in rows) == list(range(8))


def test_a_worker_that_cannot_start_ends_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def second_fails(module: str) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(start_module(module))
        return started[0]

    monkeypatch.setattr("pipeline.serving.bench.workers.start_module", second_fails)
    load = _workload()
    (cell,) = cells_of(load)
    nowhere = Address.read("127.0.0.1:9")
    job = WorkerJob(address=nowhere, model="m", workload=load, cell=cell, requests=2)
    with pytest.raises(OSError, match="no more processes"), Workers([job, job]):
        pass
    assert started[0].wait(10) is not None


def test_two_servers_are_measured_in_turns_and_compared_in_pairs(
    tmp_path: Path, here: None
) -> None:
    load = _workload(repeats=2)
    with bench_server() as one, bench_server() as other:
        first, second = _bench(one, tmp_path / "a", load), _bench(other, tmp_path / "b", load)
        runs = measure_in_turns(first, second)
    assert [run.state for run in runs] == ["complete", "complete"]
    assert runs[0].turns == runs[1].turns != ""
    (cells,) = [tuple(run.cells[0] for run in runs)]
    assert [len(cell.trials) for cell in cells] == [2, 2]
    comparison = compare_runs(read_side(tmp_path / "a"), read_side(tmp_path / "b"))
    assert (comparison.in_turns, comparison.least_percent) == (True, 1.0)
    with bench_server() as one, pytest.raises(RunInvalid, match="turns cannot be gone on with"):
        measure_in_turns(_bench(one, tmp_path / "a", load), _bench(one, tmp_path / "c", load))
