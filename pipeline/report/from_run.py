"""What a report shows of a run of `sm120 bench`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pipeline.bench.model import CellResult, GpuSeries, Interval, Mark, Run
from pipeline.bench.place import RUN_FILE, requests_digest, run_folder
from pipeline.bench.record import end_of_rows, read_run
from pipeline.bench.workload import Fixed
from pipeline.files import sha256_of_file
from pipeline.report.model import (
    Cell,
    EvidenceLink,
    Fact,
    Lengths,
    Measure,
    Memory,
    ModelRow,
    Note,
    RunData,
    Series,
)

_PARTS = ("mean", "p50", "p90", "p95", "p99")
# What tables and charts show; the rest stays in the run's own file.
NUMBERS = (
    *("requests", "completed", "failed", "retries", "concurrency"),
    *("output_tok_s", "total_tok_s", "peak_output_tok_s", "requests_s", "goodput_s"),
    *(
        f"{name}.{part}"
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms")
        for part in _PARTS
    ),
    *("prefill_tok_s.mean", "decode_tok_s.mean", "acceptance_length"),
    *("joules_per_output_token", "ready_s", "start_to_first_token_s"),
)


def read_run_data(path: Path) -> RunData:
    """A run by its folder or file."""
    folder = run_folder(path)
    run = read_run(folder)
    # `bench --out DIR` makes DIR/WORKLOAD: the name that somebody chose is the one above
    whole = folder.resolve()
    parts = whole.parts[-2:] if whole.name == run.workload.name else whole.parts[-1:]
    return run_data(
        run,
        file="/".join([*parts, RUN_FILE]),
        digest=sha256_of_file(folder / RUN_FILE),
        requests=requests_digest(folder, end_of_rows(run)),
    )


def run_data(run: Run, *, file: str, digest: str, requests: str | None) -> RunData:
    """What a report shows of it; a function of the run alone, so that it can be checked."""
    name = run.inputs.recipe_name or run.server.model
    return RunData(
        name=name,
        title=f"{run.server.model}: {run.workload.summary}",
        file=file,
        digest=digest,
        requests=requests,
        started=run.started,
        tool=f"{run.client.name} {run.client.version}",
        hardware=_hardware(run),
        software=_software(run),
        models=[_model(run)],
        series=[_series(run, name)],
        memory=_memory(run),
        evidence=_evidence(run, requests),
        notes=_notes(run),
        self_tests=run.self_tests,
    )


def _gpus(run: Run) -> list[GpuSeries]:
    trials = (trial for cell in run.cells for trial in cell.trials)
    return next((trial.samples.gpus for trial in trials if trial.samples.gpus), [])


def _hardware(run: Run) -> list[Fact]:
    gpus = Counter(gpu.name for gpu in _gpus(run))
    cards = ", ".join(f"{number}x {name}" for name, number in gpus.items())
    links = {f"generation {g.pcie_generation_most} x{g.pcie_width_most}" for g in _gpus(run)}
    return [
        Fact(name="GPUs", value=cards or "none was sampled"),
        *([Fact(name="PCIe", value=", ".join(sorted(links)))] if cards else []),
        Fact(name="Client's machine", value=f"{run.client.machine}, {run.client.cores} cores"),
    ]


def _software(run: Run) -> list[Fact]:
    engine = " ".join(filter(None, (run.server.engine, run.server.version)))
    client = run.client
    reader = f"Python {client.python}, {client.event_loop}, {client.json_reader}"
    return [
        Fact(name="Engine", value=engine or "the server does not say"),
        Fact(name="Server", value=run.server.url),
        Fact(name="Recipe", value=run.inputs.recipe_name or "none"),
        Fact(name="Client", value=f"{client.name} {client.version} ({reader})"),
        *(Fact(name=name, value=value) for name, value in sorted(run.server.settings.items())),
    ]


def _model(run: Run) -> ModelRow:
    context = run.server.context_tokens
    status = "complete" if run.state == "complete" else f"partial: {run.why_partial}"
    size = f"context of {context:,} tokens" if context else ""
    return ModelRow(name=run.server.model, size=size, status=status)


def _series(run: Run, name: str) -> Series:
    lengths, workload = None, run.workload
    if isinstance(workload.input, Fixed) and isinstance(workload.output, Fixed):
        lengths = Lengths(input=workload.input.tokens, output=workload.output.tokens)
    return Series(
        name=name,
        model=run.server.model,
        workload=workload.summary,
        lengths=lengths,
        recipe=run.inputs.recipe_name,
        cells=[_cell(result) for result in run.cells],
    )


def _cell(result: CellResult) -> Cell:
    numbers = {n: _measure(result.intervals[n]) for n in NUMBERS if n in result.intervals}
    # numbers of a void cell count for nothing, so none are shown
    numbers = {} if result.state == "void" else numbers
    return Cell(
        name=result.cell.name,
        concurrency=result.cell.concurrency,
        rate_per_s=result.cell.rate_per_s,
        state=result.state,
        numbers=with_user_speed(numbers),
        notes=_cell_notes(result),
    )


def _measure(interval: Interval) -> Measure:
    return Measure.model_validate(interval.model_dump())


def with_user_speed(numbers: dict[str, Measure]) -> dict[str, Measure]:
    """With what one user gets while an answer streams: 1 / TPOT."""
    tpot = numbers.get("tpot_ms.mean")
    if tpot is None or tpot.mean <= 0:
        return numbers
    return {**numbers, "user_tok_s": Measure(mean=round(1e3 / tpot.mean, 6), trials=tpot.trials)}


def _cell_notes(result: CellResult) -> list[Note]:
    voids = [Note(kind="void", message=why) for trial in result.trials for why in trial.void]
    marks: list[Mark] = [mark for trial in result.trials for mark in trial.marks]
    # the same mark of several trials is said once
    first = {mark.kind: mark for mark in reversed(marks)}
    return [*voids, *(Note(kind=m.kind, message=m.message) for m in first.values())]


def _memory(run: Run) -> list[Memory]:
    most: dict[int, tuple[str, int]] = {}
    for gpu in (g for c in run.cells for t in c.trials for g in t.samples.gpus):
        used = max((b for b in gpu.memory_used_bytes if b is not None), default=None)
        if used is not None:
            most[gpu.index] = (gpu.name, max(used, most.get(gpu.index, ("", 0))[1]))
    return [
        Memory(name=f"GPU {index}", unit="GiB", used=round(used / 2**30, 2), source="sampled")
        for index, (_, used) in sorted(most.items())
    ]


def _evidence(run: Run, requests: str | None) -> list[EvidenceLink]:
    inputs = run.inputs
    return [
        _link("image", inputs.image, "nothing says which image served"),
        _link("weights", inputs.weights, "nothing says which weights were served"),
        _link("recipe", inputs.recipe, "served without a recipe"),
        _link("host facts", inputs.host, "no facts of the host were given"),
        _link("workload", inputs.workload, ""),
        _link("client", run.client.digest, ""),
        _link("raw requests", requests, "requests.jsonl is not beside the run"),
    ]


def _link(name: str, digest: str | None, otherwise: str) -> EvidenceLink:
    if digest is None:
        return EvidenceLink(name=name, state="unknown", message=otherwise)
    return EvidenceLink(name=name, digest=digest, state="named")


def _notes(run: Run) -> list[Note]:
    notes = [Note(kind=mark.kind, message=mark.message) for mark in run.marks]
    if run.state == "partial":
        why = run.why_partial or "it was stopped before all cells were done"
        notes.append(Note(kind="partial", message=why))
    return notes
