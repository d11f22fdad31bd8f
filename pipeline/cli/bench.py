"""`sm120 bench`: a served recipe, or any server, is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.bench.marks import cell_marks
from pipeline.bench.model import CellResult, Inputs, Interval, Run
from pipeline.bench.record import workload_digest
from pipeline.bench.runner import Bench, Settings
from pipeline.bench.server import Server
from pipeline.bench.shipped import prompt_file, read_workload, shipped_names
from pipeline.bench.starts import measure_starts
from pipeline.bench.workload import Fixed, Load, Workload
from pipeline.cli.bench_plan import show_sweeps
from pipeline.cli.bench_starts import recipe_starter, require_recipe
from pipeline.cli.context import say_json, store_to_read
from pipeline.cli.file_statements import show_statement
from pipeline.cli.options import (
    ANY_PATH,
    EXISTING_FILE,
    EXISTING_FOLDER,
    Numbers,
    is_address,
    json_option,
)
from pipeline.cli.recipe.recipes import recipes_of, recipes_option
from pipeline.cli.result_statements import leave_run_statement
from pipeline.cli.serve.on_host import OnHost, machine_of_all, on_options
from pipeline.cli.serve.options import engine_option
from pipeline.cli.signing import Signing
from pipeline.errors import BenchVoid, NothingServed, WorkloadInvalid
from pipeline.files import sha256_of_file
from pipeline.host.facts.drift import read_facts
from pipeline.model import Digest
from pipeline.recipe.model import Recipe
from pipeline.serve.attempts import Begun
from pipeline.serve.find_engine import Wanted
from pipeline.serve.run import ServedStatus, attempts_of, status_of
from pipeline.smoke.wire import Address

_DEFAULT, _TINY = "quick", "tiny"
_HEAD = ("cell", "state", "output tok/s", "total tok/s", "TTFT ms", "TPOT ms", "p99 TTFT", "marks")


class _Rates(click.ParamType[list[float]]):
    """Rates such as 0.5,1,2."""

    name = "rates"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[float]:
        """In the order that was typed."""
        if isinstance(value, list):
            return value
        try:
            rates = [float(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of rates such as 0.5,1,2", param, ctx)
        if min(rates) <= 0:
            self.fail("must be more than 0", param, ctx)
        return rates


@click.command("run")
@click.argument("target", metavar="RECIPE|URL")
@recipes_option
@click.option(
    "--workload",
    "names",
    multiple=True,
    metavar="NAME|FILE",
    help="What to ask of it. Repeatable [default: what the recipe names, else `tiny` for"
    " a tiny recipe and `quick` for others].",
)
@click.option("--concurrency", type=Numbers(), help="Concurrent requests in place of its own.")
@click.option("--rate", type=_Rates(), help="Requests a second in place of its concurrencies.")
@click.option("--requests", type=click.IntRange(1), help="Requests of each cell.")
@click.option("--input", "input_tokens", type=click.IntRange(1), help="Prompt tokens.")
@click.option("--output", "output_tokens", type=click.IntRange(1), help="Answer tokens.")
@click.option("--repeats", type=click.IntRange(1), help="Trials of each cell.")
@click.option("--model", help="Name of the model [default: the first that the server has].")
@click.option(
    "--no-speculation", is_flag=True, help="The server does not speculate, though it does not say."
)
@click.option("--allow-loops", is_flag=True, help="Mark answers that loop, and count them.")
@click.option("--workers", type=click.IntRange(1, 256), help="Client processes [as needed].")
@click.option(
    "--host-facts",
    type=EXISTING_FILE,
    help="Facts of the server's host, as `sm120 host facts --json` writes them.",
)
@click.option("--no-self-test", is_flag=True, help="Do not measure the client first.")
@click.option(
    "--weights",
    type=EXISTING_FOLDER,
    help="Folder of the weights, for workloads that start the engine; a tiny recipe makes its own.",
)
@click.option(
    "--out",
    type=ANY_PATH,
    help="Folder for the results of each WORKLOAD; a partial run there goes on [bench].",
)
@click.option("--dry-run", is_flag=True, help="Show what would be asked, and ask nothing.")
@engine_option
@on_options
@json_option
@click.pass_context
def run(
    context: click.Context,
    /,
    target: str,
    folders: tuple[Path, ...],
    names: tuple[str, ...],
    model: str | None,
    no_speculation: bool,
    workers: int | None,
    no_self_test: bool,
    weights: Path | None,
    host_facts: Path | None,
    out: Path | None,
    dry_run: bool,
    engine: Wanted,
    on: OnHost | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Measure a server: throughput, latency, and how sure they are.

    Every raw request is kept. The same command goes on with a run that was stopped. A key for the
    server is read from SM120_API_KEY. A recipe that is served on another host (--on) is asked
    through the SSH connection, which adds to each latency.
    """
    signing = Signing()  # first: a key that cannot be read must not be found out after an hour
    is_url = is_address(target)
    if is_url and on:
        raise click.UsageError("--on is for a recipe: an address names its host itself")
    recipe = None if is_url else recipes_of(context, folders).read(target)
    workloads = {name: changed(read_workload(name), **changes) for name in names or _named(recipe)}
    if dry_run:
        # what a run refuses before it asks anything is refused here, too
        if is_url:
            Address.read(target)
        if any(workload.starts for workload in workloads.values()):
            require_recipe(recipe)
        return show_sweeps(target, workloads.values(), out or Path("bench"), as_json)
    runs = []
    for name, workload in workloads.items():
        if workload.starts:
            if on:
                raise click.UsageError(
                    f"{name}: starts are measured on the machine itself: leave --on out"
                )
            begins = recipe_starter(context, require_recipe(recipe), engine, weights, _headers())
            folder = (out or Path("bench")) / workload.name
            with begins as (starter, begun):
                inputs = _inputs(workload, recipe, begun, host_facts)
                runs.append(measure_starts(workload, starter, folder, inputs))
            _show_starts(runs[-1], as_json)
            _state(folder, signing, as_json)
            continue
        with _server_of(context, recipe, target, engine, on) as (server, served):
            bench = Bench(
                server=server,
                workload=workload,
                folder=(out or Path("bench")) / workload.name,
                inputs=_inputs(workload, recipe, _begun(context, served), host_facts),
                settings=Settings(
                    workers=workers,
                    self_test=not no_self_test,
                    prompt_file=prompt_file(name, workload),
                ),
                model=model or (served.model if served else None),
                speculates=False if no_speculation else _speculates(recipe),
            )
            runs.append(bench.run())
        if not as_json:
            _show(runs[-1], bench.folder)
        _state(bench.folder, signing, as_json)
    if as_json:
        say_json([run.model_dump(mode="json") for run in runs])
    _require_good(runs)


def _state(folder: Path, signing: Signing, as_json: bool) -> None:
    left = leave_run_statement(folder, signing)
    if not as_json:
        show_statement(left)


def _show_starts(run: Run, as_json: bool) -> None:
    if not as_json:
        names = ("ready_s", "start_to_first_token_s")
        rows = [[c.cell.name, *(_with_error(c.intervals.get(n)) for n in names)] for c in run.cells]
        click.echo(log.table(("start", "ready s", "first token s"), rows))


def _headers() -> dict[str, str]:
    key = os.environ.get("SM120_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _named(recipe: Recipe | None) -> Sequence[str]:
    if recipe is None:
        return [_DEFAULT]
    return recipe.bench or [_TINY if recipe.model.tiny else _DEFAULT]


@contextmanager
def _server_of(
    context: click.Context, recipe: Recipe | None, target: str, engine: Wanted, on: OnHost | None
) -> Iterator[tuple[Server, ServedStatus | None]]:
    """The server to measure for as long as the block lasts: an address, or a recipe's."""
    if recipe is None:
        yield Server(Address.read(target), target, _headers()), None
        return
    with machine_of_all(context, on, engine) as (site, engines):
        store = store_to_read(context)
        found = [row for each in engines for row in status_of(each, store, site)]
        served = next((row for row in found if row.recipe == recipe.name and row.healthy), None)
        if served is None or served.port is None:
            where = on.host if on else "this machine"
            raise NothingServed(f"{recipe.name}: is not served on {where}, or does not answer")
        url, door = f"http://127.0.0.1:{served.port}", site.door(served.port)
        address = Address.read(url)
        if isinstance(door, Path):
            address, url = replace(address, socket=door), f"{url} on {site.host}, through SSH"
            log.say(
                f"Requests go through the SSH connection to {site.host}, which adds to each"
                " latency: serve with --lan and measure the address to leave SSH out."
            )
        yield Server(address, url, _headers()), served


def _begun(context: click.Context, served: ServedStatus | None) -> Begun | None:
    """The serve that started it: what stood behind it, by digest."""
    if served is None:
        return None
    attempts = attempts_of(store_to_read(context)).read().attempts
    return next((each.begun for each in attempts if each.begun.id == served.attempt), None)


def _inputs(
    workload: Workload, recipe: Recipe | None, begun: Begun | None, host_facts: Path | None
) -> Inputs:
    digests: dict[str, Digest | None] = {"host": _facts_digest(host_facts)}
    if begun:
        digests |= {
            "image": begun.image_digest,
            "weights": begun.weights_digest,
            "recipe": begun.recipe_digest,
        }
    return Inputs(
        workload=workload_digest(workload), recipe_name=recipe.name if recipe else None, **digests
    )


def _facts_digest(path: Path | None) -> Digest | None:
    """Of a file of facts; any other file's digest would say nothing of a host."""
    if path is None:
        return None
    read_facts(path)
    return sha256_of_file(path)


def _speculates(recipe: Recipe | None) -> bool | None:
    if recipe is None:
        return None
    return bool(recipe.speculation and recipe.speculation.enabled)


def changed(
    workload: Workload,
    *,
    concurrency: list[int] | None = None,
    rate: list[float] | None = None,
    requests: int | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    repeats: int | None = None,
    allow_loops: bool = False,
) -> Workload:
    """A workload with what was typed in place of its own; its digest is another then."""
    values: dict[str, Any] = {}
    if concurrency or rate or requests:
        values["loads"] = _loads(workload, concurrency, rate, requests)
    if input_tokens:
        values["input"] = Fixed(tokens=input_tokens)
    if output_tokens:
        values["output"] = Fixed(tokens=output_tokens)
    values |= {"repeats": repeats} if repeats else {}
    values |= {"looping": "mark"} if allow_loops else {}
    if not values:
        return workload
    own = [name for name in ("input", "output") if name in values]
    if own or concurrency or rate:
        # what the shipped text says of lengths and loads is not true any more
        told = {name: values.get(name) or getattr(workload, name) for name in ("input", "output")}
        words = [f"{n}: {each.model_dump_json()}" for n, each in told.items() if each]
        fixed = {n: each.tokens for n, each in told.items() if isinstance(each, Fixed)}
        if len(fixed) == 2:
            words = [f"{fixed['input']} tokens in and {fixed['output']} out"]
        words += [f"concurrency {', '.join(map(str, concurrency))}"] if concurrency else []
        words += [f"{', '.join(f'{each:g}' for each in rate)} requests a second"] if rate else []
        values["summary"] = f"{workload.name} with {', '.join(words)}"
    if own and any(load.input or load.output for load in workload.loads):
        raise WorkloadInvalid(f"{workload.name}: each of its cells has lengths of its own")
    return Workload.model_validate({**workload.model_dump(), **values})


def _loads(
    workload: Workload, concurrency: list[int] | None, rate: list[float] | None, count: int | None
) -> list[Load]:
    if concurrency and rate:
        raise WorkloadInvalid("--concurrency and --rate: name one of them")
    if concurrency:
        return [Load(concurrency=each, requests=count or 4 * each) for each in concurrency]
    if rate:
        # a minute of each
        return [Load(rate_per_s=each, requests=count or max(1, round(60 * each))) for each in rate]
    return [load.model_copy(update={"requests": count} if count else {}) for load in workload.loads]


def _show(run: Run, folder: Path) -> None:
    click.echo(log.table(_HEAD, [_row(cell) for cell in run.cells]))
    for cell in run.cells:
        for why in sorted({why for trial in cell.trials for why in trial.void}):
            click.echo(f"{cell.cell.name}: void: {why}")
        for mark in cell_marks(cell.trials):
            click.echo(f"{cell.cell.name}: {mark}")
    count = max((len(cell.trials) for cell in run.cells), default=0)
    sure = f"means of {count:,} trials with 95 % confidence"
    if count < 2:
        sure = "one trial, which says nothing of its error"
    click.echo(f"{run.server.model}: {run.workload.name}; {sure}; every request is in {folder}")


def _row(cell: CellResult) -> list[object]:
    kinds = sorted({mark.kind for trial in cell.trials for mark in trial.marks})
    names = ("output_tok_s", "total_tok_s", "ttft_ms.mean", "tpot_ms.mean", "ttft_ms.p99")
    numbers = [_with_error(cell.intervals.get(name)) for name in names]
    return [cell.cell.name, cell.state, *numbers, ", ".join(kinds) or None]


def _with_error(interval: Interval | None) -> str | None:
    if interval is None:
        return None
    mean = f"{interval.mean:,.1f}"
    if interval.high is None or interval.low is None:
        return mean
    if interval.low < 0:
        return f"{mean} (0 to {interval.high:,.1f})"
    return f"{mean} ± {interval.high - interval.mean:,.1f}"


def _require_good(runs: Sequence[Run]) -> None:
    void = [
        f"{run.workload.name} {cell.cell.name}"
        for run in runs
        for cell in run.cells
        if cell.state == "void"
    ]
    if void:
        raise BenchVoid(f"{log.count(len(void), 'cell')} void: {', '.join(void)}", _loop_hint(runs))


def _loop_hint(runs: Sequence[Run]) -> str:
    """What to try where nothing but repeated text is the reason; empty where something failed."""
    trials = [t for run in runs for cell in run.cells for t in cell.trials if t.void]
    if not all(trial.metrics.looping and not trial.metrics.failed for trial in trials):
        return ""
    return (
        "The model repeats itself. --allow-loops counts such answers and marks them; for a model"
        " that can only recite, --workload tiny does so too."
    )


@click.command("list")
@json_option
def list_workloads(as_json: bool) -> None:
    """List the workloads that are shipped with this program."""
    workloads = [read_workload(name) for name in shipped_names()]
    if as_json:
        say_json([workload.model_dump(mode="json") for workload in workloads])
        return
    click.echo(log.table(("workload", "summary"), [(w.name, w.summary) for w in workloads]))
