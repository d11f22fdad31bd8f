"""`sm120 bump`: judge newer versions of an image's engine, on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import ANY_PATH, flag_option, query
from pipeline.cli.output import say_json
from pipeline.core import log

if TYPE_CHECKING:
    from pipeline.app.on_slurm import SlurmOrder


@query
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@flag_option("--all", "everything", help="Judge every image that has an engine of its own.")
@click.option(
    "--to",
    multiple=True,
    metavar="VERSION",
    help="Version to judge, or a requirement such as 'vllm>=0.30' [default: newest]. Repeatable.",
)
@click.option(
    "--output",
    type=ANY_PATH,
    help="Page to write, without its ending: .md, .html and .json [default: in the store].",
)
@flag_option(
    "--no-build",
    "built",
    help="Build nothing: machine code and start are then unknown, and unknown means to wait.",
)
@flag_option("--fresh", help="Resolve and judge again what was kept from an earlier run.")
@flag_option("--write", help="Write pins, locks and patches of what may be taken.")
@options.slurm_options
@options.platform_option
@options.mirror_option
@options.offline_option
def bump_command(
    workspace: Workspace, /, built: bool, slurm: SlurmOrder | None, as_json: bool, **options: Any
) -> None:
    """Judge newer versions of images' engines, and say whether to take them.

    For each version: the lock that it resolves to and what of it moves, a verdict on every patch
    (needed, upstreamed, superseded, conflict), the gates with the patches that are still needed,
    and whether the image starts. One page says what to do: take it, take it with these patches, or
    wait, and why. It is written as Markdown, HTML and JSON.

    Nothing in the checkout changes without --write. What was judged before is not judged again: a
    second run takes seconds, and an interrupted one continues. The exit code is 0 where all may be
    taken or nothing is newer, 50 where something failed and 51 where something is unknown.
    """
    if bool(options["names"]) == options["everything"]:
        raise click.UsageError("Name an image, or --all.")
    request = app.bump.BumpRequest(built=not built, **options)
    results = app.bump.bump_images(workspace, request, slurm)
    if as_json:
        say_json([each.as_json for each in results])
    else:
        rows = [
            [each.image, each.locked, each.version, each.advice, log.seconds(each.seconds)]
            for each in results
        ]
        click.echo(log.table(["image", "now", "judged", "advice", "time"], rows) + "\n")
        for each in results:
            click.echo(each.sentence)
    app.bump.require_takeable(results)
