"""`sm120 store`: how much it holds, whether it is undamaged, and what can go."""

from __future__ import annotations

import click

from pipeline import log
from pipeline.cli.context import say_json, store_of, store_to_read
from pipeline.cli.options import json_option
from pipeline.errors import StoreDamaged
from pipeline.gate import upkeep as gate_upkeep
from pipeline.source.upkeep import source_leftovers, source_sections
from pipeline.store import upkeep
from pipeline.store.upkeep import sections


@click.command()
@json_option
@click.pass_context
def show(context: click.Context, as_json: bool) -> None:
    """Show how much the store holds, and where it is."""
    store = store_to_read(context)
    parts = [*sections(store), *source_sections(store), *gate_upkeep.gate_sections(store)]
    if as_json:
        return say_json({"root": str(store.root), "sections": [p.model_dump() for p in parts]})
    rows = [[p.name, p.files, log.size(p.size_bytes)] for p in parts]
    click.echo(log.table(["part", "files", "size"], rows))
    click.echo(f"\n{store.root}")


@click.command()
@click.option(
    "--repair", is_flag=True, help="Remove damaged files; the next build makes them again."
)
@json_option
@click.pass_context
def check(context: click.Context, repair: bool, as_json: bool) -> None:
    """Read every file of the store again and compare it with the hash in its name."""
    store = store_of(context) if repair else store_to_read(context)
    # only removing needs the store alone; reading may go on beside a build
    with store.alone() if repair else store.in_use():
        total = upkeep.total_bytes(store)
        with log.step(f"Reading {log.size(total)}"), log.progress("read", total) as bar:
            bad = upkeep.damaged(store, bar.advance)
        if repair:
            upkeep.repair(bad)
    if as_json:
        say_json({"damaged": [str(p) for p in bad], "repaired": repair})
    else:
        for path in bad:
            click.echo(f"{'removed' if repair else 'damaged'}: {path}")
    if bad and not repair:
        raise StoreDamaged(log.count(len(bad), "damaged file"))
    if not as_json:
        removed = f"{log.count(len(bad), 'damaged file')} removed"
        click.echo(removed if bad else "the store is undamaged")


@click.command()
@click.option("--yes", is_flag=True, help="Remove; without it, only show what would go.")
@click.pass_context
def trim(context: click.Context, yes: bool) -> None:
    """Remove what no built image needs: old layers, kept inputs, stale downloads.

    What gates and compiling leave goes, too, where nothing has used it for a month: environments,
    engines and results of gates, unpacked toolchains, compiled objects. Without --yes nothing is
    removed.
    """
    store = store_of(context)
    # a build that runs now may be about to use what looks unneeded
    with store.alone():
        left = [*gate_upkeep.gate_leftovers(store), *source_leftovers(store)]
        if yes:
            click.echo(f"{log.size(upkeep.trim(store) + gate_upkeep.remove(left))} freed")
            return
        paths = upkeep.unreachable(store)
        total = sum(p.lstat().st_size for p in paths)
        left_bytes = sum(map(gate_upkeep.size_of, left))
    click.echo(
        f"{log.count(len(paths), 'file')} ({log.size(total)}) and"
        f" {log.count(len(left), 'leftover')} of gates and compiling ({log.size(left_bytes)})"
        " can go; `sm120 store trim --yes` removes them"
    )
