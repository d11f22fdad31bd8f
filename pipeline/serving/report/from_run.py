"""What a report shows of a run of `sm120 bench`, or of another program's result."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from statistics import fmean

from pipeline.core.files import sha256_of_file
from pipeline.serving.bench.foreign import read_foreign
from pipeline.serving.bench.metrics import interval
from pipeline.serving.bench.model import OF_A_START, BenchRun, CellResult, Interval
from pipeline.serving.bench.place import RUN_FILE, requests_digest, run_folder
from pipeline.serving.bench.record import end_of_rows, read_run
from pipeline.serving.bench.workload import Fixed
from pipeline.serving.report import model
from pipeline.serving.report.model import EvidenceLink, Fact, Measure, Note, ReportCell, RunData

# What the numbers of a report rest on, and why one of them may have no digest.
INPUTS = ("image", "weights", "recipe", "host facts", "workload", "client", "raw requests")
_MISSING = (
    *("nothing says which image served", "nothing says which weights were served"),
    *("served without a recipe", "no facts of the host were given", "", ""),
    "requests.jsonl is not beside the run",
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
    *("joules_per_output_token", *OF_A_START),
)


def read_run_data(path: Path) -> RunData:
    """Reads a run from its folder or file."""
    folder = run_folder(path)
    run = read_run(folder)
    # `bench --output DIR` makes DIR/WORKLOAD: the name that a user chose is the one above
    whole = folder.resolve()
    parts = whole.parts[-2:] if whole.name == run.workload.name else whole.parts[-1:]
    return run_data(
        run,
        file="/".join([*parts, RUN_FILE]),
        digest=sha256_of_file(folder / RUN_FILE),
        requests=requests_digest(folder, end_of_rows(run)),
    )


def run_data(run: BenchRun, *, file: str, digest: str, requests: str | None) -> RunData:
    """What a report shows of a run; a function of the run alone, so that anybody can check it."""
    server, client, inputs, workload = run.server, run.client, run.inputs, run.workload
    name = inputs.recipe_name or server.model
    hardware, software, memory = _setup(run)
    lengths = None
    if isinstance(workload.input, Fixed) and isinstance(workload.output, Fixed):
        lengths = model.Lengths(input=workload.input.tokens, output=workload.output.tokens)
    series = model.Series(
        name=name,
        model=server.model,
        workload=workload.summary,
        lengths=lengths,
        recipe=inputs.recipe_name,
        cells=[_cell(result) for result in run.cells],
    )
    notes = [Note(kind=mark.kind, message=mark.message) for mark in run.marks]
    # a sweep that was stopped looks like a short one
    if run.state == "partial":
        why = run.why_partial or "it was stopped before all cells were done"
        notes.append(Note(kind="partial", message=why))
    digests = (inputs.image, inputs.weights, inputs.recipe, inputs.host, inputs.workload)
    links = zip(INPUTS, (*digests, client.digest, requests), _MISSING, strict=True)
    row = model.ModelRow(
        name=server.model,
        size=f"context of {server.context_tokens:,} tokens" if server.context_tokens else "",
        status="complete" if run.state == "complete" else f"partial: {run.why_partial}",
    )
    return RunData(
        name=name,
        title=f"{server.model}: {workload.summary}",
        file=file,
        digest=digest,
        requests=requests,
        started=run.started,
        tool=f"{client.name} {client.version}",
        hardware=hardware,
        software=software,
        models=[row],
        series=[series],
        memory=memory,
        evidence=[
            EvidenceLink(name=each, digest=known, state="named")
            if known
            else EvidenceLink(name=each, state="unknown", message=why)
            for each, known, why in links
        ],
        notes=notes,
        self_tests=run.self_tests,
    )


def _setup(run: BenchRun) -> tuple[list[Fact], list[Fact], list[model.CardMemory]]:
    """Hardware, software, and the most memory that each card used, as far as they were sampled."""
    sampled = [t.samples.gpus for c in run.cells for t in c.trials if t.samples.gpus]
    gpus, client = sampled[0] if sampled else [], run.client
    kinds = Counter(gpu.name for gpu in gpus)
    cards = ", ".join(f"{number}x {name}" for name, number in kinds.items())
    hardware = {"GPUs": cards or "none was sampled"}
    if cards:
        links = {f"generation {g.pcie_generation_most} x{g.pcie_width_most}" for g in gpus}
        hardware["PCIe"] = ", ".join(sorted(links))
    hardware["Client's machine"] = f"{client.machine}, {client.cores} cores"
    engine = " ".join(filter(None, (run.server.engine, run.server.version)))
    reader = f"Python {client.python}, {client.event_loop}, {client.json_reader}"
    software = {
        "Engine": engine or "the server does not say",
        "Server": run.server.url,
        "Recipe": run.inputs.recipe_name or "none",
        "Client": f"{client.name} {client.version} ({reader})",
    }
    rows = (*software.items(), *sorted(run.server.settings.items()))
    most: dict[int, int] = {}
    for gpu in (gpu for each in sampled for gpu in each):
        for used in (used for used in gpu.memory_used_bytes if used is not None):
            most[gpu.index] = max(used, most.get(gpu.index, 0))
    memory = [
        model.CardMemory(
            name=f"GPU {index}", unit="GiB", used=round(used / 2**30, 2), source="sampled"
        )
        for index, used in sorted(most.items())
    ]
    facts, more = ([Fact(name=n, value=v) for n, v in each] for each in (hardware.items(), rows))
    return facts, more, memory


def _cell(result: CellResult) -> ReportCell:
    voids = [Note(kind="void", message=why) for trial in result.trials for why in trial.void]
    marks = [mark for trial in result.trials for mark in trial.marks]
    # the same mark of several trials once
    first = {mark.kind: mark for mark in reversed(marks)}
    # numbers of a void cell count for nothing, so none are shown
    known = {} if result.state == "void" else result.intervals
    return ReportCell(
        name=result.cell.name,
        concurrency=result.cell.concurrency,
        rate_per_s=result.cell.rate_per_s,
        state=result.state,
        numbers=with_user_speed({n: measure_of(known[n]) for n in NUMBERS if n in known}),
        notes=[*voids, *(Note(kind=m.kind, message=m.message) for m in first.values())],
    )


def measure_of(interval: Interval) -> Measure:
    """Shows an interval as a report does."""
    return Measure.model_validate(interval.model_dump())


def with_user_speed(numbers: dict[str, Measure]) -> dict[str, Measure]:
    """Adds what one user gets while an answer streams: 1 / TPOT."""
    tpot = numbers.get("tpot_ms.mean")
    if tpot is None or tpot.mean <= 0:
        return numbers
    return {**numbers, "user_tok_s": Measure(mean=round(1e3 / tpot.mean, 6), trials=tpot.trials)}


# As `sm120` names cells of other programs: c128, r4.
_CONCURRENCY = re.compile(r"c(\d{1,6})(?![\d.])")
_RATE = re.compile(r"r(\d{1,6}(?:\.\d+)?)$")
# The first that a result has; programs and versions differ.
_MODEL = ("model", "model_id", "model_name", "model_type", "tokenizer_id")


def read_foreign_data(path: Path) -> RunData:
    """Reads the result of another program from its file or folder.

    Its numbers get the nearest of our names; where definitions differ, a note says how.
    """
    run = read_foreign(path)
    settings = run.cells[0].settings if run.cells else {}
    served = next((settings[name] for name in _MODEL if name in settings), run.file)
    name = f"{served} ({run.program})"
    why = f"a result of {run.program} names no digest of it"
    cells, lengths = [], set()
    for cell in run.cells:
        concurrency, rate = _CONCURRENCY.match(cell.name), _RATE.match(cell.name)
        near = {str(number.like): number for number in cell.numbers if number.like in NUMBERS}
        numbers = {name: measure_of(interval(number.values)) for name, number in near.items()}
        # how numbers differ from what their names mean for us; each difference once
        differing: dict[str, list[str]] = {}
        for number in near.values():
            if number.difference:
                differing.setdefault(number.difference, []).append(number.name)
        notes = [
            Note(kind="defined otherwise", message=f"{', '.join(names)}: {difference}")
            for difference, names in differing.items()
        ]
        cells.append(
            ReportCell(
                name=cell.name,
                concurrency=int(concurrency[1]) if concurrency and int(concurrency[1]) else None,
                rate_per_s=float(rate[1]) if rate else None,
                numbers=with_user_speed(numbers),
                notes=notes,
            )
        )
        # tokens of a request, where all had the same
        totals = {n.ours: fmean(n.values) for n in cell.numbers if n.ours}
        count = totals.get("completed")
        means = [totals.get(n, 0.0) / count for n in ("input_tokens", "output_tokens") if count]
        is_whole = len(means) == 2 and all(mean > 0 and mean == int(mean) for mean in means)
        lengths.add(model.Lengths(input=means[0], output=means[1]) if is_whole else None)
    series = model.Series(
        name=name,
        model=served,
        workload=f"{run.program}, {run.file}",
        lengths=lengths.pop() if len(lengths) == 1 else None,
        cells=cells,
    )
    return RunData(
        name=name,
        title=f"{served}, measured with {run.program}",
        file=run.file,
        digest=run.digest,
        tool=run.program,
        software=[Fact(name=key, value=value) for key, value in sorted(settings.items())],
        models=[model.ModelRow(name=served)],
        series=[series],
        evidence=[EvidenceLink(name=each, state="unknown", message=why) for each in INPUTS],
    )
