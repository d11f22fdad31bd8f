"""`sm120 store` and `sm120 uninstall`: what this command keeps on a machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli.options import flag, json_option
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.errors import StoreDamaged

if TYPE_CHECKING:
    from pipeline.app.uninstall import Inventory


@click.command()
@json_option
@click.pass_obj
def show(workspace: Workspace, as_json: bool) -> None:
    """Show how much the store holds, and where it is."""
    root, parts = app.store.sections_of(workspace)
    if as_json:
        return say_json({"root": str(root), "sections": [p.model_dump() for p in parts]})
    rows = [[p.name, p.files, log.size(p.size_bytes)] for p in parts]
    click.echo(log.table(["part", "files", "size"], rows))
    click.echo(f"\n{root}")


@click.command()
@flag("--repair", help="Remove damaged files; the next build makes them again.")
@json_option
@click.pass_obj
def check(workspace: Workspace, repair: bool, as_json: bool) -> None:
    """Read every file of the store again and compare it with the hash in its name."""
    bad = app.store.check(workspace, repair=repair)
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
@flag("--yes", help="Remove; without it, only show what would go.")
@click.pass_obj
def trim(workspace: Workspace, yes: bool) -> None:
    """Remove what no built image needs: old layers, kept inputs, stale downloads.

    What gates and compiling leave goes, too, where nothing has used it for a month: environments,
    engines and results of gates, unpacked toolchains, compiled objects. Without --yes nothing is
    removed.
    """
    if yes:
        return click.echo(f"{log.size(app.store.trim(workspace))} freed")
    found = app.store.trimmable(workspace)
    click.echo(
        f"{log.count(found.files, 'file')} ({log.size(found.file_bytes)}) and"
        f" {log.count(found.leftovers, 'leftover')} of gates and compiling"
        f" ({log.size(found.leftover_bytes)}) can go; `sm120 store trim --yes` removes them"
    )


@click.command()
@flag("--keys", help="Remove your keys and your own trust file, too.")
@flag("--yes", help="Remove without asking.")
@flag("--dry-run", help="List what would be removed, and remove nothing.")
@json_option
@click.pass_obj
def uninstall(workspace: Workspace, keys: bool, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Remove what this command made: the store, tags in Docker and Podman, environments.

    All of it is listed first, and you are asked. Keys and your own trust file go only with --keys:
    what a lost key signed cannot be signed again. Nothing else is touched: weights, results,
    images under names that you chose and the checkout itself stay where they are.
    """
    found = app.uninstall.take_inventory(workspace, keys=keys)
    if not as_json:
        _show_inventory(found)
    going, is_done = found.going, False
    # a script cannot answer, and silence is no yes
    may_ask = not yes and not as_json and sys.stdin.isatty()
    question = f"\nRemove {log.count(len(going), 'thing')}?"
    if going and not dry_run and (yes or (may_ask and click.confirm(question, err=True))):
        app.uninstall.remove(found)
        is_done = True
    if as_json:
        rows = [item.model_dump(mode="json") for item in found.items]
        return say_json({"removed": is_done, "items": rows, "stays": found.stays})
    if is_done:
        click.echo(f"\n{log.count(len(going), 'thing')} removed")
    elif found.items:
        options = "--yes" if going else "--keys --yes"
        can_go = any(i.goes or i.what in app.uninstall.PRECIOUS for i in found.items)
        more = f"; `{options}` removes it" if can_go and not dry_run else ""
        click.echo(f"\nnothing was removed{more}")


def _show_inventory(found: Inventory) -> None:
    if not found.items:
        return click.echo("nothing of this command is here")
    rows = [
        [
            item.what,
            item.where,
            log.size(item.size_bytes),
            "" if item.goes else item.kept_for or "kept (--keys)",
        ]
        for item in found.items
    ]
    click.echo("\n".join([log.table(["what", "where", "size", ""], rows), "", *found.stays]))
