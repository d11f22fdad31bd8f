"""`sm120 bump` and `sm120 catalogue`: judge other versions of engines, on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import flag_option, many_option, path_option, query
from pipeline.cli.output import say_json
from pipeline.core import log

if TYPE_CHECKING:
    from pipeline.app.on_slurm import SlurmOrder


@query
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@flag_option("--all", "everything", help="Judge every image that has an engine of its own.")
@many_option(
    "--to",
    metavar="VERSION",
    help="Version to judge, or a requirement such as 'vllm>=0.30' [default: newest]. Repeatable.",
)
@path_option(
    "--output",
    help="Page to write, without its ending: .md, .html and .json [default: in the store].",
)
@flag_option(
    "--no-build",
    "built",
    help="Build nothing: machine code and start are then unknown, and unknown means to wait.",
)
@flag_option(
    "--quick",
    help="Of the gates, judge only the cases that patches name: the rest is then unknown.",
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
        raise click.UsageError("Name an image, or --all, and not both.")
    request = app.bump.BumpRequest(built=not built, **options)
    results = app.bump.bump_images(workspace, request, slurm)
    if as_json:
        say_json([each.as_json for each in results])
    else:
        rows = [
            [
                *(each.image, each.locked, each.version, each.advice),
                "kept" if each.is_kept else log.seconds(each.seconds),
            ]
            for each in results
        ]
        click.echo(log.table(["image", "now", "judged", "advice", "time"], rows) + "\n")
        for each in results:
            click.echo(each.sentence)
    app.bump.require_takeable(results)


@query
@many_option(
    "--engine",
    "engines",
    metavar="REQUIREMENT",
    help="Engine and its releases, such as 'vllm>=0.27' [default: all of a year]. Repeatable.",
)
@path_option(
    "--output", default="catalogue", help="Page to write, without its ending: .json, .md and .html."
)
@click.option(
    "--most", type=click.IntRange(1), default=24, help="Newest releases to judge of each engine."
)
@flag_option("--fresh", help="Resolve and judge again what was kept from an earlier run.")
@options.mirror_option
@options.offline_option
def catalogue_make_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Judge releases of engines for each SM120 card, and write one page.

    Every release is locked like an image of this checkout. The kernels that have broken on SM120
    are compiled with the Triton of that lock, without a GPU, for sm_120 and sm_121: as published,
    and with the patches of this checkout. The page answers which release fits a card, and with
    which patch. Releases that cannot be locked are listed with the reason.

    Releases that an earlier run judged are not judged again, and rows of the page that is there
    stay. The files are stated, signed where there is a key: `sm120 verify catalogue.html`.
    """
    made, stated = app.catalogue.make_catalogue(
        workspace, app.catalogue.CatalogueRequest(**options)
    )
    for each in stated:
        log.say(f"statement: {each.file}, {each.state}")
    if as_json:
        return say_json(made.model_dump(mode="json"))
    rows = [
        [
            *(each.engine, each.version),
            *(card.answer[:60] for card in each.cards),
            *([""] * (len(app.catalogue.CARDS) - len(each.cards))),
            each.error[:60],
        ]
        for each in made.releases
    ]
    click.echo(log.table(["engine", "release", *app.catalogue.CARDS, "not judged"], rows))
