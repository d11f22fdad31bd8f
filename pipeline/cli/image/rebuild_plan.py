"""`sm120 image rebuild --dry-run`: what would be built again, and what would be fetched for it."""

from __future__ import annotations

from dataclasses import replace

import click

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.assemble.plan import work_for
from pipeline.cli.context import say_json
from pipeline.cli.image.plan import layer_rows, work_of
from pipeline.store.store import Store


def show_rebuild(first: Built, store: Store, *, keep_objects: bool, as_json: bool) -> None:
    """The work of a build in an empty store; nothing is made, not even that one."""
    # a name that no store has: nothing that was built before is found there
    work, trees = work_of([first.plan], Store(store.tmp / "no-store"))
    disk_bytes = work.disk_bytes
    # inputs and the layers of a foreign base that the store kept do not travel again
    near = [pin for pin in work.fetch if store.has_input(pin.sha256, pin.size_bytes)]
    known = work_for([first.plan], store)
    work = replace(
        work,
        fetch=tuple(pin for pin in work.fetch if pin not in near),
        bases=known.bases,
        base_bytes=known.base_bytes,
    )
    if as_json:
        return say_json(
            {
                "image": first.name,
                "platform": first.platform,
                "digest": first.digest,
                "layers": [layer.title for layer in work.missing],
                "compile": [tree.title for tree in trees],
                "keep_objects": keep_objects,
                "fetch_files": len(work.fetch),
                "fetch_bytes": work.fetch_bytes,
                "base_bytes": work.base_bytes,
                "store_files": len(near),
                "disk_bytes": disk_bytes,
                "dry_run": True,
            }
        )
    click.echo(log.table(["layer", "size (about)", "state"], layer_rows(work, trees)))
    click.echo(f"\n{first.name} for {first.platform} would be compared with {first.digest}")
    if trees and keep_objects:
        click.echo("Compiled objects are taken from the store as far as it has them")
    bases = f", and {log.size(work.base_bytes)} of foreign bases" if work.bases else ""
    click.echo(
        f"{log.count(len(work.fetch), 'file')} to fetch, {log.size(work.fetch_bytes)}{bases};"
        f" {log.count(len(near), 'file')} from the store; disk needed meanwhile"
        f" {log.size(disk_bytes)}; nothing was built"
    )
