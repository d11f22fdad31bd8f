"""`sm120 store`: what this command keeps on a machine."""

from __future__ import annotations

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli.options import command, flag_option, query
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.errors import StoreDamaged


@query
def store_show_command(workspace: Workspace, as_json: bool) -> None:
    """Show how much the store holds, and where it is."""
    root, parts = app.store.sections_of(workspace)
    if as_json:
        return say_json({"root": str(root), "sections": [p.model_dump() for p in parts]})
    rows = [[p.name, p.files, log.size(p.size_bytes)] for p in parts]
    click.echo(log.table(["part", "files", "size"], rows))
    click.echo(f"\n{root}")


@query
@flag_option("--repair", help="Remove damaged files; the next build makes them again.")
def store_check_command(workspace: Workspace, repair: bool, as_json: bool) -> None:
    """Read every file of the store again and compare it with the hash in its name."""
    bad = app.store.check_store(workspace, repair=repair)
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


@command
@flag_option("--yes", help="Remove; without it, only show what would go.")
def store_trim_command(workspace: Workspace, yes: bool) -> None:
    """Remove what no built image needs: old layers, kept inputs, stale downloads.

    What gates and compiling leave goes, too, where nothing has used it for a month: environments,
    engines and results of gates, unpacked toolchains, compiled objects. Without --yes nothing is
    removed.
    """
    found = app.store.trim_store(workspace, dry_run=not yes)
    if yes:
        return click.echo(f"{log.size(found.freed_bytes)} freed")
    click.echo(
        f"{log.count(found.files, 'file')} ({log.size(found.file_bytes)}) and"
        f" {log.count(found.leftovers, 'leftover')} of gates and compiling"
        f" ({log.size(found.leftover_bytes)}) can go; `sm120 store trim --yes` removes them"
    )
