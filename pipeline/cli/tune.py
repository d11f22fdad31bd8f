"""`sm120 tune`: faster sizes for a recipe's kernel, measured on this machine's card."""

from __future__ import annotations

from typing import Any

import click

from pipeline.app import tune
from pipeline.app.signing import Signing
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import flag_option, many_option, path_option, query
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.known import Unknown


@query
@click.argument("recipe", metavar="RECIPE")
@options.recipes_option
@path_option("--weights", help="The model's folder, or its config.json.")
@many_option(
    "--tokens",
    type=click.IntRange(1, 65536),
    default=tune.TOKENS,
    metavar="N",
    help="A number of tokens in a batch to tune; give it once for each. A table has all sizes from"
    " 1 to 4096: the others keep what an earlier run found, else the engine's own.",
)
@click.option(
    "--most",
    type=click.IntRange(1, 1000),
    default=60,
    show_default=True,
    help="The most trials for each number of tokens.",
)
@click.option(
    "--gpu", type=click.IntRange(0, 63), default=0, show_default=True, help="The card to use."
)
@options.engine_option
@flag_option("--dry-run", help="Say whether the recipe reads such a table; measures nothing.")
def tune_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Find faster sizes for the kernel of a recipe's experts, on the card that will serve it.

    First it says whether the recipe reads such a table at all: INT4 and FP4 experts have kernels of
    their own. Then each trial runs in a process of its own in the recipe's image, beside the
    engine's own choice, and only sizes that the shared-memory gate lets pass are tried. Trials
    are kept: a run that was stopped goes on where it ended.

    A table is kept only where it is faster with 95 % confidence. It is a signed statement about the
    image, for this recipe, card, driver, power limit and highest clock; `sm120 publish` brings it
    along, and `sm120 serve` on this machine uses it where all of them are the same, and says why
    where not.
    """
    request = tune.TuneRequest(**options)
    done = tune.tune_recipe(workspace, request, Signing())
    shape = done.shape
    if as_json:
        reason = shape.unknown if isinstance(shape, Unknown) else None
        return say_json(
            {
                "recipe": done.recipe,
                "reads_table": reason is None,
                "reason": reason,
                "shape": None if isinstance(shape, Unknown) else shape.model_dump(mode="json"),
                "rows": [row.model_dump(mode="json") for row in done.rows],
                "table": done.table.model_dump(mode="json") if done.table else None,
                "earlier": done.earlier.model_dump(mode="json") if done.earlier else None,
            }
        )
    if isinstance(shape, Unknown):
        return click.echo(f"{done.recipe}: nothing to tune: {shape.unknown}")
    kind = f"{shape.dtype}, blocks of {shape.block}" if shape.block else shape.dtype or "bf16"
    click.echo(
        f"{done.recipe}: reads a table for {shape.experts} experts of width {shape.width}, {kind}"
    )
    if not done.rows:
        return None
    rows = []
    for row in done.rows:
        gain = "none faster"
        if row.ratio and row.ratio.low is not None and row.ratio.high is not None:
            gain = f"{100 * (1 - row.ratio.high):.1f} to {100 * (1 - row.ratio.low):.1f} %"
        sizes = " ".join(str(value) for value in row.config.values())
        times = f"{row.default_us:.1f}", f"{row.us:.1f}"
        rows.append([str(row.tokens), *times, gain, sizes, f"{row.trials} ({row.failed} failed)"])
    click.echo(log.table(["tokens", "default µs", "tuned µs", "faster", "sizes", "trials"], rows))
    if done.table is None:
        stays = "the engine's own sizes stay"
        if done.earlier:
            card = done.earlier.card
            stays = f"kernel-table-{done.recipe} of an earlier run stays, for {card.name}"
            stays += f", driver {card.driver}"
        return click.echo(f"\nNo gain: nothing was written; {stays}.")
    return click.echo(
        f"\nKept for {done.table.card.name}, driver {done.table.card.driver}: {done.signed}"
    )
