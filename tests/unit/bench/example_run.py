"""A small run as tests read it: two concurrencies, three trials each, one of them void."""

from __future__ import annotations

import random
from pathlib import Path

from pipeline.core.model import canonical_json, sha256_of
from pipeline.serving.bench.metrics import intervals, metrics_of
from pipeline.serving.bench.model import (
    BenchRun,
    Cell,
    CellResult,
    ClientFacts,
    EngineSeries,
    GpuSeries,
    Inputs,
    Mark,
    RequestRow,
    Samples,
    SelfTest,
    ServerFacts,
    Trial,
)
from pipeline.serving.bench.record import append_rows, write_run
from pipeline.serving.bench.workload import Fixed, Load, Objectives, Workload

FOLDER = Path(__file__).parent / "example"
_STARTED = "2026-11-02T08:00:00Z"
_REQUESTS, _INPUT, _OUTPUT = 6, 32, 8


def example_workload() -> Workload:
    """Small enough to be read by a person."""
    return Workload(
        name="example",
        summary="32 tokens in, 8 out, alone and two at a time",
        input=Fixed(tokens=_INPUT),
        output=Fixed(tokens=_OUTPUT),
        loads=[Load(concurrency=c, requests=_REQUESTS) for c in (1, 2)],
        objectives=Objectives(ttft_ms=60, tpot_ms=12),
    )


def example_rows(concurrency: int, trial: int, *, failed: bool = False) -> list[RequestRow]:
    """Requests with a little noise, always the same."""
    noise = random.Random(f"{concurrency} {trial}")
    rows, busy = [], [0.0] * concurrency
    for number in range(_REQUESTS):
        stream = number % concurrency
        first = round(0.050 * concurrency**0.5 + noise.uniform(0, 0.004), 6)
        gaps = [round(10_000 + noise.uniform(-800, 800)) for _ in range(_OUTPUT - 1)]
        end = round(first + sum(gaps) / 1e6 + 0.001, 6)
        row = RequestRow(
            number=number,
            sent_s=round(busy[stream], 6),
            first_byte_s=round(first - 0.002, 6),
            first_token_s=first,
            end_s=end,
            gaps_us=gaps,
            chunks=_OUTPUT,
            asked_input=_INPUT,
            asked_output=_OUTPUT,
            input_tokens=_INPUT,
            output_tokens=_OUTPUT,
            characters=4 * _OUTPUT,
            finish="length",
            status=200,
        )
        busy[stream] += end + 0.0005
        rows.append(row)
    if failed:
        lost = {"failure": "lost", "message": "the connection ended in mid-answer", "finish": ""}
        rows[-1] = rows[-1].model_copy(update={**lost, "gaps_us": gaps[:3], "chunks": 4})
    return rows


def _gpu() -> GpuSeries:
    return GpuSeries(
        index=0,
        name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        at_s=[0.0, 0.5],
        power_w=[410.0, 420.0],
        sm_clock_mhz=[2400.0, 2385.0],
        memory_clock_mhz=[13365.0, 13365.0],
        temperature_c=[61.0, 62.0],
        memory_used_bytes=[90 << 30, 90 << 30],
        utilization_percent=[98.0, 99.0],
        throttle=[[], ["sw_power_cap"]],
        pcie_generation=[5, 5],
        pcie_width=[16, 16],
        pcie_generation_most=5,
        pcie_width_most=16,
        pcie_replays=[0, 0],
    )


def _trial(folder: Path, concurrency: int, number: int, at: int) -> Trial:
    failed = concurrency == 2 and number == 1
    rows = example_rows(concurrency, number, failed=failed)
    engine = EngineSeries(
        at_s=[0.0, 0.5], running=[1.0, 1.0], waiting=[0.0, 0.0], kv_use=[0.1, 0.2]
    )
    return Trial(
        number=number,
        started=_STARTED,
        metrics=metrics_of(rows, example_workload().objectives, energy_j=207.5),
        marks=[Mark(kind="throttled", message="GPU 0: sw_power_cap in 1 of 2 samples")],
        void=["1 of 6 requests failed: lost"] if failed else [],
        samples=Samples(gpus=[_gpu()], engine=engine),
        requests=append_rows(folder, rows, at),
        warmup_requests=concurrency,
        drained_s=0.1,
    )


def _self_test(concurrency: int) -> SelfTest:
    return SelfTest(
        concurrency=concurrency,
        workers=1,
        requests=4,
        tokens=400,
        true_ttft_ms=200.0,
        true_tpot_ms=20.0,
        read_ttft_ms=200.4,
        read_tpot_ms=20.01,
        ttft_error=0.002,
        tpot_error=0.0005,
        offered_tok_s=50.0 * concurrency,
        ceiling_tok_s=60_000.0,
        cpu_us_per_token=16.0,
        trusted=True,
    )


def write_example(folder: Path) -> BenchRun:
    """The whole run, written as the client writes it."""
    workload = example_workload()
    cells, at = [], 0
    for load in workload.loads:
        assert load.concurrency is not None
        trials = []
        for number in range(3):
            trials.append(_trial(folder, load.concurrency, number, at))
            at += trials[-1].requests.bytes
        cell = Cell(
            name=f"c{load.concurrency}",
            concurrency=load.concurrency,
            requests=load.requests,
            input=workload.input,
            output=workload.output,
        )
        state = "void" if any(trial.void for trial in trials) else "good"
        cells.append(
            CellResult.model_validate(
                {"cell": cell, "state": state, "trials": trials, "intervals": intervals(trials)}
            )
        )
    run = BenchRun(
        state="complete",
        started=_STARTED,
        ended="2026-11-02T08:01:00Z",
        workload=workload,
        inputs=Inputs(workload=sha256_of(canonical_json(workload.model_dump(mode="json")))),
        server=ServerFacts(url="http://127.0.0.1:8000", model="example-model", engine="vllm"),
        client=ClientFacts(
            version="0",
            digest=sha256_of(b"the client's code"),
            python="3.11.2",
            event_loop="uvloop",
            json_reader="orjson",
            machine="x86_64",
            cores=2,
            open_files=65536,
        ),
        self_tests=[_self_test(1), _self_test(2)],
        cells=cells,
    )
    write_run(folder, run)
    return run


if __name__ == "__main__":
    write_example(FOLDER)
