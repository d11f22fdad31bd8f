"""Results of `sm120 bench`: two side by side, a gate for CI, and statements about them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from pipeline import log
from pipeline.bench.metrics import DEFINITIONS
from pipeline.bench.model import Inputs, Interval
from pipeline.bench.place import runs_in
from pipeline.bench.record import read_run, workload_digest
from pipeline.bench.results.compare import (
    GATED,
    LEAST,
    LEAST_IN_TURNS,
    STATISTIC,
    Comparison,
    GateRow,
    InputChange,
    NumberChange,
    judge,
    read_side,
)
from pipeline.bench.results.compare import compare as compare_sides
from pipeline.bench.results.recompute import require_as_measured
from pipeline.bench.runner import Bench, Settings, measure_in_turns
from pipeline.bench.server import Server
from pipeline.bench.shipped import prompt_file, read_workload
from pipeline.cli.context import say_json
from pipeline.cli.file_statements import show_statement
from pipeline.cli.options import ANY_PATH, json_option
from pipeline.cli.result_statements import leave_run_statement
from pipeline.cli.signing import Signing
from pipeline.errors import BenchUndecided, BenchWorse, InputInvalid
from pipeline.smoke.wire import Address

# what a person asks first; --all and --json have every number
_SHOWN = (
    *("output_tok_s", "total_tok_s", "requests_s", "goodput_s", "ttft_ms.mean", "ttft_ms.p50"),
    *("ttft_ms.p99", "tpot_ms.mean", "tpot_ms.p50", "tpot_ms.p99", "latency_ms.p50"),
    *("latency_ms.p99", "acceptance_length", "joules_per_output_token"),
)
_LONG = 60
_PARTS = ("mean", "p50", "p90", "p95", "p99", "least", "most")
_RESULT = click.Path(exists=True, path_type=Path)


@click.command("compare")
@click.argument("first")
@click.argument("second")
@click.option(
    "--live", is_flag=True, help="FIRST and SECOND are servers: measure them now, in turns."
)
@click.option(
    "--workload", "workload_name", default="quick", show_default=True, help="With --live."
)
@click.option(
    "--repeats",
    type=click.IntRange(2),
    default=8,
    show_default=True,
    help="With --live: trials of each cell and server.",
)
@click.option(
    "--out",
    type=ANY_PATH,
    default=Path("bench"),
    show_default=True,
    help="With --live: folder for both runs, as first/WORKLOAD and second/WORKLOAD.",
)
@click.option(
    "--least",
    type=click.FloatRange(0, 100),
    help="Percent that a winner must surely be ahead"
    f" [default: {LEAST:g}; {LEAST_IN_TURNS:g} where both were measured in turns].",
)
@click.option("--all", "everything", is_flag=True, help="Show every number.")
@click.option("--gate", is_flag=True, help="Fail where SECOND is worse than FIRST, the baseline.")
@click.option(
    "--allow",
    type=click.FloatRange(0, 100),
    default=5.0,
    show_default=True,
    help="With --gate: percent by which a number may be worse.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    help=f"With --gate: judge this number. Repeatable [default: {', '.join(GATED)}].",
)
@json_option
def compare(
    first: str,
    second: str,
    live: bool,
    workload_name: str,
    repeats: int,
    out: Path,
    least: float | None,
    everything: bool,
    gate: bool,
    allow: float,
    metrics: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show what changed between two results in inputs and numbers, and how sure that is.

    A result is the folder of a run, or the one that --out named; or a file of vllm bench,
    sglang.bench_serving or aiperf. A winner is named only where it is surely ahead by --least
    percent: two runs of one server differ, too.

    With --live, FIRST and SECOND are the addresses of two servers. They are measured in turns, one
    trial each, so that what drifts does so for both.
    """
    _require_known(metrics)
    if live:
        paths = _measured_in_turns((first, second), workload_name, repeats, out)
    else:
        paths = [_RESULT.convert(each, None, None) for each in (first, second)]
    comparison = compare_sides(read_side(paths[0]), read_side(paths[1]), least)
    rows = judge(comparison, allow, metrics or GATED) if gate else []
    if as_json:
        say_json({**comparison.model_dump(), "gate": [row.model_dump() for row in rows]})
    else:
        click.echo("\n".join(_text(comparison, rows, everything)))
    if gate:
        _require_passed(comparison, rows)


def _measured_in_turns(urls: tuple[str, str], name: str, repeats: int, out: Path) -> list[Path]:
    """The folders of two new runs, each stated."""
    signing = Signing()
    workload = read_workload(name).model_copy(update={"repeats": repeats})
    key = os.environ.get("SM120_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    first, second = (
        Bench(
            server=Server(Address.read(url), url, headers),
            workload=workload,
            folder=out / side / workload.name,
            inputs=Inputs(workload=workload_digest(workload)),
            settings=Settings(prompt_file=prompt_file(name, workload)),
        )
        for side, url in zip(("first", "second"), urls, strict=True)
    )
    measure_in_turns(first, second)
    for bench in (first, second):
        leave_run_statement(bench.folder, signing)
    return [first.folder, second.folder]


@click.command("attest")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=_RESULT)
@json_option
def attest(runs: tuple[Path, ...], as_json: bool) -> None:
    """State the digests of results and of what stood behind them, and sign that.

    A run is stated as soon as it is measured; this is for one that was measured without a key.
    What does not follow from its requests is not signed.
    """
    signing = Signing()
    left = []
    # a path without a run goes on as it is: its error says what is missing
    for folder in (each for path in runs for each in runs_in(path) or [path]):
        require_as_measured(folder, read_run(folder))
        left.append(leave_run_statement(folder, signing, is_all=True))
    if as_json:
        return say_json([each._asdict() for each in left])
    for each in left:
        show_statement(each)


def _require_known(metrics: Sequence[str]) -> None:
    for name in metrics:
        definition = DEFINITIONS.get(name.partition(".")[0])
        if definition is None or definition.better == "none":
            raise InputInvalid(
                f"{name}: is no number that can be better or worse",
                "Write it as output_tok_s, ttft_ms.mean or tpot_ms.p99.",
            )


def _text(comparison: Comparison, gate: Sequence[GateRow], everything: bool) -> Iterator[str]:
    yield from _inputs("inputs that differ", comparison.inputs)
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
    if shown:
        head = ["cell", "number", "first", "second", "change", "verdict"]
        yield f"\n{log.table(head, [_row(cell, number, reasons) for cell, number in shown])}"
    yield from (f"[{number}] {why}" for number, why in enumerate(reasons, 1))
    for cell in comparison.cells:
        yield from _inputs(f"\n{cell.name}: settings that differ", cell.inputs)
        yield from (f"{cell.name}: {note}" for note in cell.notes)
    yield from (f"{name}: only in {comparison.first}" for name in comparison.only_first)
    yield from (f"{name}: only in {comparison.second}" for name in comparison.only_second)
    if gate:
        verdicts = [[row.verdict, row.cell, row.number, row.message] for row in gate]
        yield f"\n{log.table(['gate', 'cell', 'number', 'message'], verdicts)}"
    how = "measured in turns" if comparison.in_turns else "measured one after the other"
    yield f"\nStatistic: {STATISTIC}. Least difference: {comparison.least_percent:g} %, {how}."


def _inputs(title: str, changes: Sequence[InputChange]) -> Iterator[str]:
    if changes:
        rows = [[each.name, each.first or "–", each.second or "–"] for each in changes]
        yield log.table([title, "first", "second"], rows)


def _row(cell: str, number: NumberChange, reasons: Sequence[str]) -> list[str]:
    change, verdict = number.change, str(number.verdict)
    if number.why in reasons:
        verdict = f"no winner [{reasons.index(number.why) + 1}]"
    elif number.why:
        verdict = f"no winner: {number.why}"
    percent = f"{change.percent:+.1f} %" if change else ""
    if change and change.low is not None:
        percent += f" ({change.low:+.1f} to {change.high:+.1f})"
    return [cell, number.name, _mean(number.first), _mean(number.second), percent, verdict]


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


def _require_passed(comparison: Comparison, rows: Sequence[GateRow]) -> None:
    where = f"{comparison.second} against {comparison.first}"
    for verdict, error in (("worse", BenchWorse), ("undecided", BenchUndecided)):
        found = [row for row in rows if row.verdict == verdict]
        if found or (verdict == "undecided" and not rows):
            first = f"{found[0].cell} {found[0].number}: {found[0].message}" if found else "no cell"
            raise error(f"{where}: {first}")
