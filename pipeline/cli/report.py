"""`sm120 report`: results as one page that people open, and as PDF, Markdown and CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    ANY_PATH,
    file_option,
    flag_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.serving.report.build import all_references
from pipeline.serving.report.page import data_digest


@query
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=ANY_PATH)
@many_option(
    "--output",
    "targets",
    type=ANY_PATH,
    default=["report.html"],
    help="File to write; its ending says what: .html, .pdf, .md, .csv. Repeatable.",
)
@many_option(
    "--reference",
    "references",
    metavar="NAME|none|all",
    help="Published tables to draw beside [default: those of the same workload]. Repeatable.",
)
@flag_option("--list-references", help="List the published tables, and stop.")
@click.option("--title", help="Title of the report.")
@file_option(
    "--log",
    "log_path",
    help="Log of the start of one RUN, for how memory was split [default: that of the attempt].",
)
@file_option(
    "--host-facts",
    "host_path",
    help="Facts of the server's host, as `sm120 host facts --json` writes them.",
)
@flag_option(
    "--redact",
    "is_redacted",
    help="Leave out host names, addresses, paths, serial numbers and user names.",
)
@many_option(
    "--quality",
    "quality_paths",
    type=ANY_PATH,
    help="Result of `sm120 quality` to show: its folder, or quality.json. Repeatable.",
)
@flag_option(
    "--paste",
    "is_pasted",
    help="Print one redacted block for an issue tracker, and write no file.",
)
@click.option("--recipe", help="Recipe of --paste [default: the RUN's, else the last one tried].")
@path_option(
    "--smoke",
    "smoke_path",
    help="Result of `sm120 smoke --output`, for --paste [default: the one kept by the image].",
)
@options.look_in_option
@options.own_recipes_option
@options.trust_option
def report_command(
    workspace: Workspace,
    /,
    list_references: bool,
    is_pasted: bool,
    folders: tuple[Path, ...],
    own_recipes: tuple[Path, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Show runs of `sm120 bench` as one HTML file, with charts, findings and evidence.

    A RUN is a folder that `sm120 bench` made, with one run or several. It may also be a result
    of vllm bench, sglang.bench_serving or aiperf.

    The file needs no network. It holds its data, and `sm120 verify` compares the file with what
    was signed, and its data with the runs. Without a RUN, it shows the published tables that
    --reference names.

    --paste prints what an issue needs, for runs, or without one for the last start of a recipe:
    host, image, recipe, the kernels that the engine named, smoke test, benchmark, and what is
    missing with the reason. Keys, tokens, names, addresses, paths and serial numbers are replaced.
    """
    if list_references:
        tables = [(r.name, len(r.series), r.title) for r in all_references()]
        return click.echo(log.table(("name", "tables", "title"), tables))
    request = app.report.ReportRequest(folders=(*folders, *own_recipes), **options)
    if is_pasted:
        given = click.get_current_context().get_parameter_source("targets")
        if given is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError("--paste prints: leave --output out, or add `> FILE`.")
        pasted = app.paste.paste_report(workspace, request)
        if as_json:
            return say_json({"text": pasted.text, "skipped": pasted.skipped})
        return click.echo(pasted.text, nl=False)
    if request.recipe or request.smoke_path:
        raise click.UsageError("--recipe and --smoke are for --paste.")
    for target in request.targets:
        if target.suffix not in app.report.FORMATS:
            message = f"{target}: must end with .html, .pdf, .md or .csv"
            raise click.BadParameter(message, param_hint="'--output'")
    if not request.runs and not request.references and not request.quality_paths:
        raise click.UsageError("Name a RUN, or published tables with --reference, or --quality.")
    if request.log_path and len(request.named_runs()) > 1:
        raise click.UsageError("--log is of one start: name one RUN with it.")
    data = app.report.make_report(workspace, request)
    if as_json:
        files = [str(target) for target in request.targets]
        say_json({"files": files, "data": data_digest(data), "findings": len(data.findings)})
    else:
        rows = [(target, log.size(target.stat().st_size)) for target in request.targets]
        click.echo(log.table(("file", "size"), rows))
