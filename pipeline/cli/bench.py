"""`sm120 bench`: measure a served recipe or any server, and compare results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.recipes import is_address
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    COUNTS,
    EXISTING_FILE,
    Numbers,
    command,
    file_option,
    flag_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import answer_keys, say_json
from pipeline.core import log
from pipeline.serving.bench.marks import cell_marks
from pipeline.serving.bench.metrics import DEFINITIONS
from pipeline.serving.bench.results.compare import (
    GATED,
    LEAST,
    LEAST_IN_TURNS,
    LEAST_ONE_START,
    ONE_START,
    STATISTIC,
)
from pipeline.serving.bench.trace import record_trace
from pipeline.serving.bench.workload import read_workload, shipped_names

if TYPE_CHECKING:
    from pipeline.app.on_slurm import SlurmOrder
    from pipeline.app.serve import RemoteHost
    from pipeline.app.statements import FileStatement
    from pipeline.serving.bench.model import BenchRun, Interval
    from pipeline.serving.bench.results.compare import BenchComparison, GateRow, InputChange

_CELLS = ("cell", "state", "output tok/s", "total tok/s", "TTFT ms", "TPOT ms", "p99 TTFT", "marks")
# what a person asks first; --all and --json have every number
_SHOWN = (
    *("output_tok_s", "total_tok_s", "requests_s", "goodput_s", "ttft_ms.mean", "ttft_ms.p50"),
    *("ttft_ms.p99", "tpot_ms.mean", "tpot_ms.p50", "tpot_ms.p99", "latency_ms.p50"),
    *("latency_ms.p99", "acceptance_length", "joules_per_output_token"),
)
# of a cell with reads: heads, and digits after the point
_BESIDE = {
    "decode_alone_tok_s": ("alone tok/s", 1),
    "decode_under_load_tok_s": ("under load tok/s", 1),
    "decode_kept": ("kept", 3),
    "worst_pause_ms": ("worst pause ms", 0),
    "read_tok_s": ("read tok/s", 0),
}
_LONG = 60
_PARTS = ("mean", "p50", "p90", "p95", "p99", "least", "most")
_RESULT = click.Path(exists=True, path_type=Path)
_RATES = Numbers("0.5,1,2", 1e-6, float)


# of a measurement, wherever it is made
_measure_options = options.all_of(
    [
        options.recipes_option,
        many_option(
            "--workload",
            "names",
            metavar="NAME|FILE",
            help="What to ask of it. Repeatable [default: what the recipe names, else `tiny` for"
            " a tiny recipe and `quick` for others].",
        ),
        click.option("--concurrency", type=COUNTS, help="Concurrent requests in place of its own."),
        click.option("--rate", type=_RATES, help="Requests a second in place of concurrencies."),
        click.option("--requests", type=click.IntRange(1), help="Requests of each cell."),
        click.option("--input-tokens", type=click.IntRange(1), help="Prompt tokens."),
        click.option("--output-tokens", type=click.IntRange(1), help="Answer tokens."),
        click.option("--repeats", type=click.IntRange(1), help="Trials of each cell."),
        click.option("--model", help="Name of the model [default: the first that the server has]."),
        flag_option("--no-speculation", help="The server does not speculate, but does not say so."),
        flag_option("--allow-loops", help="Mark answers that loop, and count them."),
        click.option(
            "--workers", type=click.IntRange(1, 256), help="Client processes [as needed]."
        ),
        flag_option("--no-self-test", help="Do not measure the client first."),
        options.engine_option,
    ]
)
_CHANGES = ("concurrency", "rate", "requests", "input_tokens", "output_tokens", "repeats")


@query
@click.argument("target", metavar="RECIPE|URL")
@_measure_options
@click.option(
    "--starts",
    type=click.IntRange(1),
    help="Start the engine of the recipe so often, and measure a share of the trials in each start;"
    " the intervals are over starts [default: measure what is served].",
)
@file_option(
    "--host-facts",
    help="Facts of the server's host, as `sm120 host facts --json` writes them; with --on they must"
    " be those that the host has now [default with --on: asked of the host].",
)
@click.option(
    "--weights",
    type=options.EXISTING_FOLDER,
    help="Folder of the weights, for workloads that start the engine; a tiny recipe makes its own.",
)
@path_option(
    "--output",
    "out",
    help="Folder for the results of each WORKLOAD; a partial run there goes on [bench].",
)
@click.option("--pull", metavar="REGISTRY/REPO", help="Of starts: fetch the image first.")
@options.access_options
@options.on_options
@options.slurm_job_options
def bench_run_command(
    workspace: Workspace,
    /,
    target: str,
    out: Path | None,
    on: RemoteHost | None,
    slurm: Callable[[str | None], SlurmOrder | None],
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a server: throughput, latency, and how sure they are.

    Every raw request is kept. The same command goes on with a run that was stopped. A key for the
    server is read from SM120_API_KEY. A recipe that is served on another host (--on) is asked
    through the SSH connection, which adds to each latency; the facts of that host are kept beside
    the results, and the numbers are bound to them.

    With --on slurm[:PARTITION], nodes of a cluster serve the recipe and measure it, a job with a
    whole node for each workload; a workload whose folder holds its run is not measured again.
    """
    if is_address(target) and on:
        raise click.UsageError("--on is for a recipe: an address names its host itself")
    changes = {name: options.pop(name) for name in (*_CHANGES, "starts", "allow_loops")}
    is_cluster = on is not None and on.host.partition(":")[0] == "slurm"
    order = slurm(on.host if on and is_cluster else None)
    request = app.bench.BenchRequest(
        target, changes=changes, out=out or Path("bench"), on=None if order else on, **options
    )
    if order and (request.host_facts or (on and on.inventories)):
        raise click.UsageError("--on slurm: nodes send their own facts, and have no inventory")
    _, workloads = app.bench.chosen_workloads(workspace, request)
    started = [n for n, each in workloads.items() if each.starts or each.engine_starts > 1]
    if on and (starts := started):
        raise click.UsageError(
            f"{starts[0]}: starts are measured on the machine itself: leave --on out"
        )

    def show(run: BenchRun, folder: Path, stated: FileStatement) -> None:
        if as_json:
            return
        if run.workload.starts:
            from pipeline.serving.bench.model import OF_A_START

            # an engine whose log does not tell its parts has no columns for them
            names = [n for n in OF_A_START if any(n in c.intervals for c in run.cells)]
            rows = [
                [c.cell.name, *(_with_error(c.intervals.get(n)) for n in names)] for c in run.cells
            ]
            words = (name.removesuffix("_s").replace("_", " ") for name in names)
            heads = [f"{word.replace('start to ', '')} s" for word in words]
            click.echo(log.table(("start", *heads), rows))
        else:
            click.echo("\n".join(_lines(run, folder)))
        click.echo(f"statement: {stated.file}, {stated.state}")

    if order:
        runs = app.bench_nodes.measure_on_nodes(workspace, request, order, show)
    else:
        runs = app.bench.measure_server(workspace, request, show)
    if as_json:
        say_json([run.model_dump(mode="json") for run in runs])
    app.bench.require_good(runs)


@command
@click.argument("target", metavar="RECIPE")
@_measure_options
@path_option("--weights", help="Folder of the weights on the node.")
def bench_answer_command(workspace: Workspace, /, target: str, **options: Any) -> None:
    """Serve a recipe and measure it by the workloads whose keys come on stdin, a key a line.

    `sm120 bench run --on slurm` runs this on a node. Prints a line of JSON when it begins, one with
    the digest of the recipe, and one with each run and its requests. Nothing is kept.
    """
    changes = {name: options.pop(name) for name in (*_CHANGES, "allow_loops")}
    request = app.bench.BenchRequest(target, changes=changes, **options)
    answer_keys(lambda keys: app.bench_nodes.answer_benches(workspace, request, keys))


def _lines(run: BenchRun, folder: Path) -> Iterator[str]:
    names, rows = ("output_tok_s", "total_tok_s", "ttft_ms.mean", "tpot_ms.mean", "ttft_ms.p99"), []
    for cell in run.cells:
        kinds = sorted({mark.kind for trial in cell.trials for mark in trial.marks})
        numbers = [_with_error(cell.intervals.get(name)) for name in names]
        rows.append([cell.cell.name, cell.state, *numbers, ", ".join(kinds) or None])
    yield log.table(_CELLS, rows)
    if beside := [cell for cell in run.cells if cell.cell.reads]:
        rows = [
            [c.cell.name, *(_with_error(c.intervals.get(n), d) for n, (_, d) in _BESIDE.items())]
            for c in beside
        ]
        yield f"\n{log.table(('a writer', *(head for head, _ in _BESIDE.values())), rows)}"
        known = ", ".join(f"{name} {value}" for name, value in run.server.settings.items())
        unknown = "neither the server nor a recipe tells how it batches"
        yield f"settings: {known or unknown}"
    for cell in run.cells:
        turns = {n: i for n, i in cell.intervals.items() if n.startswith("ttft_by_turn_ms.")}
        if turns:
            named = {n.partition(".")[2]: i for n, i in turns.items()}
            order = sorted(named, key=lambda each: int(each.partition("-")[0]))
            columns = {"cached_share": 3, "repeated_share": 3, "session_s.mean": 1}
            shown = [_with_error(cell.intervals.get(n), digits) for n, digits in columns.items()]
            row = [cell.cell.name, *shown, *(_with_error(named[each], 0) for each in order)]
            heads = ("sessions", "cached", "trace repeats", "session s")
            yield f"\n{log.table((*heads, *(f'TTFT ms, turn {n}' for n in order)), [row])}"
    for cell in run.cells:
        for why in sorted({why for trial in cell.trials for why in trial.void}):
            yield f"{cell.cell.name}: void: {why}"
        yield from (f"{cell.cell.name}: {mark}" for mark in cell_marks(cell.trials))
    count = max((len(cell.trials) for cell in run.cells), default=0)
    sure = f"means of {count:,} trials with 95 % confidence"
    if (starts := run.workload.engine_starts) > 1:
        sure = f"means of {starts} starts of the engine, {count:,} trials, with 95 % confidence"
    if count < 2:
        sure = "one trial, which says nothing of its error"
    yield f"{run.server.model}: {run.workload.name}; {sure}; every request is in {folder}"


def _with_error(interval: Interval | None, digits: int = 1) -> str | None:
    if interval is None:
        return None
    mean = f"{interval.mean:,.{digits}f}"
    if interval.high is None or interval.low is None:
        return mean
    if interval.low < 0:
        return f"{mean} (0 to {interval.high:,.{digits}f})"
    return f"{mean} ± {interval.high - interval.mean:,.{digits}f}"


@click.command("list")
@options.json_option
def bench_list_command(as_json: bool) -> None:
    """List the workloads that are shipped with this program."""
    workloads = [read_workload(name) for name in shipped_names()]
    if as_json:
        say_json([workload.model_dump(mode="json") for workload in workloads])
        return
    click.echo(log.table(("workload", "summary"), [(w.name, w.summary) for w in workloads]))


@click.command("compare")
@click.argument("first")
@click.argument("second")
@flag_option("--live", help="FIRST and SECOND are servers: measure them now, in turns.")
@click.option("--workload", "workload_name", default="quick", help="With --live.")
@click.option(
    "--repeats",
    type=click.IntRange(2),
    default=8,
    help="With --live: trials of each cell and server.",
)
@path_option(
    "--output",
    "out",
    default=Path("bench"),
    help="With --live: folder for both runs, as first/WORKLOAD and second/WORKLOAD.",
)
@click.option(
    "--least",
    type=click.FloatRange(0, 100),
    help="Percent that a winner must surely be ahead"
    f" [default: {LEAST:g}; {LEAST_ONE_START:g} where a side has one start of its engine;"
    f" {LEAST_IN_TURNS:g} where both were measured in turns].",
)
@flag_option("--all", "everything", help="Show every number.")
@flag_option("--gate", help="Fail where SECOND is worse than FIRST, the baseline.")
@click.option(
    "--allow",
    type=click.FloatRange(0, 100),
    default=5.0,
    help="With --gate: percent by which a number may be worse.",
)
@many_option(
    "--metric",
    "metrics",
    help=f"With --gate: judge this number. Repeatable [default: {', '.join(GATED)}].",
)
@options.json_option
def bench_compare_command(
    first: str,
    second: str,
    live: bool,
    workload_name: str,
    repeats: int,
    out: Path,
    everything: bool,
    gate: bool,
    metrics: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Show what changed between two results in inputs and numbers, and how sure that is.

    A result is the folder of a run, or the one that --output named; or a file of vllm bench,
    sglang.bench_serving or aiperf. A winner is named only where it is surely ahead by --least
    percent: two runs of one server differ, too.

    With --live, FIRST and SECOND are the addresses of two servers. They are measured in turns, one
    trial each, so that what drifts does so for both.
    """
    app.bench.require_metrics(metrics)
    if live:
        paths = app.bench.measure_two((first, second), workload_name, repeats, out)
    else:
        paths = [_RESULT.convert(each, None, None) for each in (first, second)]
    one, two = paths
    comparison, rows, error = app.bench.compare_results(
        one, two, gate=gate, metrics=metrics, **options
    )
    if as_json:
        say_json({**comparison.model_dump(), "gate": [row.model_dump() for row in rows]})
    else:
        click.echo("\n".join(_text(comparison, rows, everything)))
    if error:
        raise error


def _text(comparison: BenchComparison, gate: Sequence[GateRow], everything: bool) -> Iterator[str]:
    yield from _inputs_text("inputs that differ", comparison.inputs)
    if not comparison.inputs:
        yield "inputs: the same, as far as both name them"
    # those with names of their own are what somebody put two programs side by side for
    every = {f"{name}.{part}" for name in DEFINITIONS for part in _PARTS} | {*DEFINITIONS}
    shown = [
        (cell, number)
        for cell, number in comparison.numbers()
        if everything or number.name not in every or number.name in _SHOWN
    ]
    # long reasons stand below the table, each once
    reasons = list(dict.fromkeys(n.why for _, n in shown if len(n.why) > _LONG))
    rows = []
    for cell, number in shown:
        change, verdict = number.change, str(number.verdict)
        if number.why:
            is_long = number.why in reasons
            why = f" [{reasons.index(number.why) + 1}]" if is_long else f": {number.why}"
            verdict = f"no winner{why}"
        percent = f"{change.percent:+.1f} %" if change else ""
        if change and change.low is not None:
            percent += f" ({change.low:+.1f} to {change.high:+.1f})"
        means = (_mean(number.first), _mean(number.second))
        rows.append([cell, number.name, *means, percent, verdict])
    if rows:
        head = ["cell", "number", "first", "second", "change", "verdict"]
        yield f"\n{log.table(head, rows)}"
    yield from (f"[{number}] {why}" for number, why in enumerate(reasons, 1))
    for each in comparison.cells:
        yield from _inputs_text(f"\n{each.name}: settings that differ", each.inputs)
        yield from (f"{each.name}: {note}" for note in each.notes)
    yield from (f"{name}: only in {comparison.first}" for name in comparison.only_first)
    yield from (f"{name}: only in {comparison.second}" for name in comparison.only_second)
    if gate:
        verdicts = [[row.verdict, row.cell, row.number, row.message] for row in gate]
        yield f"\n{log.table(['gate', 'cell', 'number', 'message'], verdicts)}"
    how = "measured in turns" if comparison.in_turns else "measured one after the other"
    yield f"\nStatistic: {STATISTIC}. Least difference: {comparison.least_percent:g} %, {how}."
    if min(comparison.starts) < 2:
        counts = " and ".join(log.count(count, "start") for count in comparison.starts)
        yield f"{ONE_START} ({counts} of the engine)."


def _inputs_text(title: str, changes: Sequence[InputChange]) -> Iterator[str]:
    if changes:
        rows = [[each.name, each.first or "–", each.second or "–"] for each in changes]
        yield log.table([title, "first", "second"], rows)


def _mean(interval: Interval) -> str:
    mean = _plain(interval.mean, 5)
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} ± {_plain((interval.high - interval.low) / 2, 3)}"


def _plain(value: float, digits: int) -> str:
    """A number with so many digits, never as a power of ten where a person reads it."""
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


@click.command("record")
@click.argument("engine_log", metavar="LOG", type=EXISTING_FILE)
@path_option("--output", "out", default=Path("trace.jsonl"), help="The trace.")
@click.option("--block-tokens", type=click.IntRange(1, 4096), default=64, help="Tokens of a block.")
@options.json_option
def bench_record_command(engine_log: Path, out: Path, block_tokens: int, as_json: bool) -> None:
    """Make a trace of the requests in an engine's own log, without a word of them.

    LOG is that of vLLM (VLLM_LOGGING_LEVEL=DEBUG, --enable-log-requests, --enable-log-outputs) or
    of SGLang (--log-requests --log-requests-level 3). Each block of a prompt becomes a number, the
    same for the same beginning, so that a workload with `prompts: {kind: trace}` replays what was
    cached.
    """
    made = record_trace(engine_log, out, block_tokens)
    if as_json:
        return say_json(made._asdict())
    counts = f"{log.count(made.requests, 'request')} in {log.count(made.sessions, 'session')}"
    click.echo(f"{out}: {counts}, blocks of {made.block_tokens} tokens")
    prompts = f"{{kind: trace, path: {out.name}, block_tokens: {made.block_tokens}}}"
    log.say(f"Next: write a workload beside it with `prompts: {prompts}`; docs/bench.md.")
    if made.unfinished:
        click.echo(f"left out, as the log has no answer: {log.count(made.unfinished, 'request')}")


@click.command("attest")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=_RESULT)
@options.json_option
def bench_attest_command(runs: tuple[Path, ...], as_json: bool) -> None:
    """State the digests of results and of what stood behind them, and sign that.

    A run is stated as soon as it is measured; this is for one that was measured without a key.
    What does not follow from its requests is not signed.
    """
    stated = app.bench.attest_results(runs)
    if as_json:
        return say_json([each._asdict() for each in stated])
    for each in stated:
        click.echo(f"statement: {each.file}, {each.state}")
