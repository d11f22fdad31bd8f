"""`sm120 report`: results as one page that people open, and as PDF, Markdown and CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import click

from pipeline import log
from pipeline.bench.place import is_run, run_folder, runs_in
from pipeline.cli.context import checkout_or_none, say_json, store_to_read
from pipeline.cli.options import (
    ANY_PATH,
    EXISTING_FILE,
    json_option,
    look_in_option,
    trust_option,
)
from pipeline.cli.recipe.recipes import own_recipes_option
from pipeline.cli.report_evidence import with_states
from pipeline.cli.result_statements import leave_report_statement
from pipeline.cli.signing import Signing, trust_of
from pipeline.errors import StoreUnusable
from pipeline.files import sha256_of_file, write_bytes
from pipeline.host.facts.drift import read_facts
from pipeline.report.build import report_data
from pipeline.report.engine_memory import memory_of_log
from pipeline.report.findings import WRONG
from pipeline.report.from_host import with_host
from pipeline.report.from_run import read_foreign_data, read_run_data
from pipeline.report.model import Reference, ReportData, RunData
from pipeline.report.page import data_digest, render_page
from pipeline.report.pdf import print_pdf
from pipeline.report.redact import redact
from pipeline.report.reference import all_references, fitting, named_reference
from pipeline.report.text import render_csv, render_markdown
from pipeline.serve.attempts import Attempt, stamp
from pipeline.serve.run import attempts_of
from pipeline.store.store import Store
from pipeline.verify.chain import Judge
from pipeline.verify.runs import Behind

_FORMATS: dict[str, Callable[[ReportData], bytes]] = {
    ".html": render_page,
    ".md": render_markdown,
    ".csv": render_csv,
}
_MOST_LOG_BYTES = 64 << 20
_MOST_FILES = 1000  # of a folder, among which the facts of a host are looked for


class _Target(click.ParamType[Path]):
    """A file whose ending says its format."""

    name = "file"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """The path."""
        path = Path(str(value))
        if path.suffix not in (*_FORMATS, ".pdf"):
            self.fail(f"{path}: must end with .html, .pdf, .md or .csv", param, ctx)
        return path


@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=ANY_PATH)
@click.option(
    "--to",
    "targets",
    multiple=True,
    type=_Target(),
    default=["report.html"],
    show_default=True,
    help="File to write; its ending says what: .html, .pdf, .md, .csv. Repeatable.",
)
@click.option(
    "--reference",
    "references",
    multiple=True,
    metavar="NAME|none|all",
    help="Published tables to draw beside [default: those of the same workload]. Repeatable.",
)
@click.option("--list-references", is_flag=True, help="List the published tables, and stop.")
@click.option("--title", help="Title of the report.")
@click.option(
    "--log",
    "log_path",
    type=EXISTING_FILE,
    help="Log of the start of one RUN, for how memory was split [default: that of the attempt].",
)
@click.option(
    "--host-facts",
    "host_path",
    type=EXISTING_FILE,
    help="Facts of the server's host, as `sm120 host facts --json` writes them.",
)
@click.option(
    "--redact",
    "is_redacted",
    is_flag=True,
    help="Leave out host names, addresses, paths, serial numbers and user names.",
)
@look_in_option
@own_recipes_option
@trust_option
@json_option
@click.pass_context
def report(
    context: click.Context,
    runs: tuple[Path, ...],
    targets: tuple[Path, ...],
    references: tuple[str, ...],
    list_references: bool,
    title: str | None,
    log_path: Path | None,
    host_path: Path | None,
    is_redacted: bool,
    folders: tuple[Path, ...],
    own_recipes: tuple[Path, ...],
    trust_path: Path | None,
    as_json: bool,
) -> None:
    """Show runs of `sm120 bench` as one HTML file, with charts, findings and evidence.

    A RUN is a folder that `sm120 bench` made, with one run or several. It may also be a result
    of vllm bench, sglang.bench_serving or aiperf.

    The file needs no network. It holds its data, and `sm120 verify` compares the file with what
    was signed, and its data with the runs. Without a RUN, it shows the published tables that
    --reference names.
    """
    if list_references:
        return _list()
    if not runs and not references:
        raise click.UsageError("Name a RUN, or published tables with --reference.")
    judge = Judge(trust_of(context, trust_path), checkout_or_none(context), datetime.now(UTC))
    behind = Behind(_store(context), (*folders, *own_recipes))
    named = [each for path in runs for each in runs_in(path) or [path]]
    if log_path and len(named) > 1:
        raise click.UsageError("--log is of one start: name one RUN with it.")
    # what `bench --host-facts` was given is often in the folder where all commands are typed
    behind = Behind(behind.store, (*behind.folders, Path.cwd()))
    read = [_read(path, log_path, judge, behind) for path in named]
    if host_path is not None:
        facts, digest = read_facts(host_path), sha256_of_file(host_path)
        read = [with_host(run, facts) if _is_host_of(run, digest) else run for run in read]
    else:
        read = [_with_known_host(run, path, behind) for run, path in zip(read, named, strict=True)]
    beside = _chosen(references, read)
    data = report_data(
        read,
        beside,
        _attempts(behind.store) if read else [],
        made=stamp(datetime.now(UTC)),
        title=title,
    )
    data = redact(data) if is_redacted else data
    for target in targets:
        _write(data, target)
    if as_json:
        files = [str(target) for target in targets]
        say_json({"files": files, "data": data_digest(data), "findings": len(data.findings)})
    else:
        rows = [(target, log.size(target.stat().st_size)) for target in targets]
        click.echo(log.table(("file", "size"), rows))


def _is_host_of(run: RunData, digest: str) -> bool:
    """Whether facts may be of the host that a run names; one that names none is believed."""
    named = next((link.digest for link in run.evidence if link.name == "host facts"), None)
    if named not in (None, digest):
        log.say(f"{run.name}: was measured on a host of other facts, {named}; it keeps its own")
    return named in (None, digest)


def _with_known_host(run: RunData, path: Path, behind: Behind) -> RunData:
    """A run with the facts that it names by digest, if a folder here has them."""
    named = next((link.digest for link in run.evidence if link.name == "host facts"), None)
    folder = run_folder(path)
    for place in (*behind.folders, folder, folder.parent) if named else ():
        for file in islice(sorted(place.glob("*.json")), _MOST_FILES):
            is_small = file.is_file() and file.stat().st_size <= _MOST_LOG_BYTES
            if is_small and sha256_of_file(file) == named:
                return with_host(run, read_facts(file))
    return run


def _list() -> None:
    rows = [(r.name, len(r.series), r.title) for r in all_references()]
    click.echo(log.table(("name", "tables", "title"), rows))


def _chosen(names: Sequence[str], runs: Sequence[RunData]) -> list[Reference]:
    if not names:
        return fitting(runs)
    if "all" in names:
        return list(all_references())
    return [named_reference(name) for name in names if name != "none"]


def _read(path: Path, log_path: Path | None, judge: Judge, behind: Behind) -> RunData:
    if not is_run(path):
        return _with_memory(read_foreign_data(path), log_path, is_named=True)
    run = read_run_data(path)
    run = _with_memory(run, log_path or _kept_log(run, behind.store), is_named=bool(log_path))
    with log.step(f"Checking {path}"):
        checked = with_states(run, path, judge, behind)
    for link in checked.evidence:
        if link.state in WRONG:
            log.say(f"{path}: {link.name}: {link.state}: {link.message}")
    return checked


def _kept_log(run: RunData, store: Store | None) -> Path | None:
    """The log of the start that was measured: the last one of its recipe before the run."""
    if store is None or run.started is None:
        return None
    attempts, recipes = attempts_of(store), {series.recipe for series in run.series}
    paths = [
        attempts.log_path(attempt.begun.id)
        for attempt in attempts.read().attempts
        if attempt.begun.recipe in recipes and attempt.begun.at <= run.started
        if any(end.outcome == "serving" for end in attempt.ends)
    ]
    return next((path for path in reversed(paths) if path.is_file()), None)


def _with_memory(run: RunData, path: Path | None, *, is_named: bool) -> RunData:
    if path is None:
        return run
    with path.open("rb") as file:
        lines = file.read(_MOST_LOG_BYTES).decode(errors="replace").splitlines()
    memory = memory_of_log(lines)
    if not memory and is_named:
        # of a log that nobody named, nobody expects it: llama.cpp on a CPU says nothing
        log.say(f"{path}: no line tells how memory was split")
    if not memory:
        return run
    return run.model_copy(update={"memory": memory})


def _store(context: click.Context) -> Store | None:
    """The store; a report can be made without one."""
    try:
        return store_to_read(context)
    except StoreUnusable:
        return None


def _attempts(store: Store | None) -> list[Attempt]:
    """What was tried on this machine."""
    return attempts_of(store).read().attempts if store else []


def _write(data: ReportData, target: Path) -> None:
    if target.suffix == ".pdf":
        with log.step(f"Printing {target}"):
            print_pdf(render_page(data), target)
    else:
        write_bytes(target, _FORMATS[target.suffix](data))
    # the others are made of the page's data, and hold none that could be compared
    if target.suffix == ".html":
        left = leave_report_statement(target, data, Signing())
        log.say(f"statement: {left.file}, {left.state}")
