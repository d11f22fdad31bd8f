"""`sm120 image warm`: an image's kernels, compiled before its first request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.app import warm
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.gate import arch_option
from pipeline.cli.options import flag_option, query
from pipeline.cli.output import say_json
from pipeline.core import log

if TYPE_CHECKING:
    from pipeline.app.on_slurm import SlurmOrder

_MOST_SHOWN = 110  # characters of a reason in a table
_MOST_LACKING = 20  # kernels that are listed


@query
@click.argument("image", metavar="IMAGE")
@click.option(
    "--recipe", "recipes", multiple=True, metavar="RECIPE", help="Only what this recipe calls."
)
@flag_option("--report", help="Show what recipes need and what is there; compiles nothing.")
@arch_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write the layer's files below this folder.",
)
@options.platform_option
@options.slurm_options
@options.mirror_option
@options.offline_option
def image_warm_command(
    workspace: Workspace,
    /,
    as_json: bool,
    report: bool,
    slurm: SlurmOrder | None,
    **options: Any,
) -> None:
    """Compile the Triton kernels and Python files of an image, and pack them as its warm layer.

    No GPU is needed: the cases of the shared-memory gate are called with the image's own Python,
    Triton and engine, at the image's paths, and what Triton's cache then holds is kept. Each entry
    is judged: machine code for the card, and no more shared memory than it has. FlashInfer's
    modules, where the spec names some, are compiled by its own commands. `sm120 build` does
    the same where the layer is missing, and says why where it is stale.

    With --report, each recipe's kernels are counted by library: needed, present, missing and why.
    With --recipe or --arch, the entries are for --output: the image's own layer
    has all of its cases.
    """
    request = warm.WarmRequest(**options)
    if report:
        for name in ("arch", "output"):
            if options[name]:
                raise click.UsageError(f"--{name} is for compiling: a report compiles nothing")
        if slurm:
            raise click.UsageError("--on slurm is for compiling: a report compiles nothing")
        rows = warm.report_warm(workspace, request)
        if as_json:
            return say_json([row.model_dump(mode="json") for row in rows])
        table = []
        for row in rows:
            needed = "unknown" if row.needed is None else row.needed
            why = "; ".join([*([row.reason] if row.reason else []), *row.missing])[:_MOST_SHOWN]
            table.append([row.recipe, row.library, row.state, needed, row.present, why])
        head = ["recipe", "library", "state", "needed", "present", "why"]
        return click.echo(log.table(head, table))
    done = warm.warm_image(workspace, request, slurm)
    index, kernels = done.index, [e for e in done.index.entries.values() if e.module]
    if as_json:
        return say_json(
            {
                "image": done.plan.image,
                "layer": done.layer,
                "size_bytes": done.size_bytes,
                "seconds": round(done.seconds, 1),
                **index.model_dump(mode="json"),
            }
        )
    launchers = len(index.entries) - len(kernels)
    rows_shown = [
        ["kernels", f"{len(kernels)} of {len({(e.module, e.kernel) for e in kernels})} functions"],
        ["launchers", str(launchers)],
        ["modules", str(len(index.modules.entries)) if index.modules else "0"],
        ["Python files", str(index.python_files)],
        ["files", log.size(done.size_bytes)],
        ["card", f"{index.card}, Triton {index.triton}"],
        ["worker time", log.seconds(done.seconds)],
        ["layer", done.layer or "not kept: it has not all cases"],
        ["left out", log.count(len(index.missing), "kernel")],
    ]
    click.echo(log.table(["what", "value"], rows_shown))
    for lack in index.missing[:_MOST_LACKING]:
        click.echo(f"  {lack.case}: {lack.kernel}: {lack.reason[:_MOST_SHOWN]}")
