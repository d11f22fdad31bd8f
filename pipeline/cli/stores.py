"""Commands that look after the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import checkout_of, json_option, say_json, store_of, store_to_read
from pipeline.errors import StoreDamaged, UnknownImage

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.store.store import Store


@click.group()
def store() -> None:
    """Show, check and trim the store of layers and downloads."""


@store.command()
@json_option
@click.pass_context
def show(context: click.Context, as_json: bool) -> None:
    """How much of what the store holds."""
    from pipeline.gate.upkeep import gate_sections
    from pipeline.store.upkeep import sections

    found = store_to_read(context)
    parts = [*sections(found), *gate_sections(found)]
    if as_json:
        return say_json({"root": str(found.root), "sections": [p.model_dump() for p in parts]})
    rows = [[p.name, str(p.files), log.size(p.size_bytes)] for p in parts]
    click.echo(log.table(["part", "files", "size"], rows))
    click.echo(f"\n{found.root}")


@store.command()
@click.option(
    "--repair", is_flag=True, help="Remove damaged files; the next build makes them again."
)
@json_option
@click.pass_context
def check(context: click.Context, repair: bool, as_json: bool) -> None:
    """Read everything again and compare it with its name."""
    from pipeline.store import upkeep

    found = store_of(context) if repair else store_to_read(context)
    with found.alone() if repair else found.in_use():
        total = upkeep.total_bytes(found)
        with log.step(f"Reading {log.size(total)}"), log.progress("read", total) as bar:
            bad = upkeep.damaged(found, bar.advance)
        if repair:
            upkeep.repair(bad)
    if as_json:
        say_json({"damaged": [str(p) for p in bad], "repaired": repair})
    else:
        for path in bad:
            click.echo(f"{'removed' if repair else 'damaged'}: {path}")
    if bad and not repair:
        raise StoreDamaged(f"{len(bad)} damaged files")
    if as_json:
        return
    click.echo("the store is whole" if not bad else f"{len(bad)} damaged files removed")


@store.command()
@click.option("--yes", is_flag=True, help="Really remove; without it, only say what would go.")
@click.pass_context
def trim(context: click.Context, yes: bool) -> None:
    """Remove what no built image needs: old layers, kept inputs, stale downloads.

    And what gates left that no lock of this checkout leads to: environments, engines, answers.
    """
    from pipeline.gate import upkeep as gate_upkeep
    from pipeline.store import upkeep

    found = store_of(context)
    with found.alone():
        gates = _gate_leftovers(context, found)
        if yes:
            click.echo(f"{log.size(upkeep.trim(found) + gate_upkeep.remove(gates))} freed")
            return
        paths = upkeep.unreachable(found)
        total = sum(p.lstat().st_size for p in paths)
        left = sum(map(gate_upkeep.size_of, gates))
    click.echo(
        f"{len(paths)} files, {log.size(total)}, and {len(gates)} leftovers of gates,"
        f" {log.size(left)}, could go; `sm120 store trim --yes` removes them"
    )


def _gate_leftovers(context: click.Context, found: Store) -> list[Path]:
    """None where there is no checkout: only locks say what is still wanted."""
    from pipeline.gate.upkeep import gate_leftovers

    try:
        checkout = checkout_of(context)
    except UnknownImage:
        log.say("Not in a checkout: what gates left is not looked at.")
        return []
    return gate_leftovers(found, checkout)
