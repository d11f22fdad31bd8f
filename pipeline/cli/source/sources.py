"""`sm120 source list` and `sm120 source lock`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json, store_of
from pipeline.cli.options import json_option, locking_dry_run_option
from pipeline.errors import LockEdited, LockMissing, LockStale, SpecInvalid
from pipeline.fetch.http import Client
from pipeline.fetch.inputs import Fetcher
from pipeline.fetch.settings import read_settings
from pipeline.fetch.sources import Sources
from pipeline.fetch.transport import make_transport
from pipeline.lock.source import (
    SourceLock,
    current_source_lock,
    read_source_lock,
    write_source_lock,
)
from pipeline.source.locking import Outside, lock_file, lock_source
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store


@click.command("list")
@json_option
@click.pass_context
def list_sources(context: click.Context, as_json: bool) -> None:
    """List the sources that can be compiled here, with their builds and times."""
    checkout = checkout_of(context)
    rows = [row for name in checkout.sources() for row in _rows(checkout, name)]
    if as_json:
        return say_json(rows)
    columns = ["source", "build", "toolchain", "for", "locked", "time"]
    table = [[str(row[c]) for c in columns] for row in rows]
    click.echo(log.table(columns, table))


def _rows(checkout: Checkout, name: str) -> list[dict[str, Any]]:
    spec = checkout.source(name)
    try:
        lock = current_source_lock(checkout.source_lock_path(name), spec)
        state = lock.archive.version or lock.archive.file
    except (LockMissing, LockStale, LockEdited) as error:
        state = {"LockMissing": "no", "LockStale": "stale"}.get(type(error).__name__, "edited")
    return [
        {
            "source": name,
            "build": build,
            "toolchain": each.toolchain,
            "for": ", ".join([*each.platforms, *each.architectures]),
            "locked": state,
            "time": f"{each.cpu_minutes} CPU-minutes",
        }
        for build, each in spec.builds.items()
    ]


@click.command("lock")
@click.argument("names", metavar="[SOURCE]...", nargs=-1)
@click.option(
    "--from",
    "archive",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Lock this archive instead of the one that the spec names a place of.",
)
@locking_dry_run_option
@json_option
@click.pass_context
def lock(
    context: click.Context,
    names: tuple[str, ...],
    archive: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Look up archives of sources and the digest of their files, and write their locks.

    Without SOURCE, of all. A lock names an archive by its hash and its files by one digest: the
    same files from another archive, such as a `git archive` of your own, are the same source.
    """
    checkout, store = checkout_of(context), store_of(context)
    if archive and len(names) != 1:
        raise SpecInvalid("--from locks exactly one source", "sm120 source lock SOURCE --from FILE")
    rows = []
    for name in names or tuple(checkout.sources()):
        spec = checkout.source(name)
        with log.step(f"Locking {name}"):
            if archive:
                new = lock_file(store, spec, archive)
            else:
                new = lock_source(store, spec, _outside(store))
        rows += _moves(_old(checkout, name), new)
        if not dry_run:
            path = checkout.source_lock_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_source_lock(path, new)
    if as_json:
        return say_json(rows)
    if not rows:
        click.echo("nothing would change" if dry_run else "locked; nothing changed")
        return
    columns = ["source", "what", "before", "after"]
    click.echo(log.table(columns, [[row[c] or "-" for c in columns] for row in rows]))


def _outside(store: Store) -> Outside:
    client = Client(read_settings())
    transport = make_transport()
    return Outside(
        list_files=_lister(client),
        size_of=transport.wheel_size,
        debian=transport.debian,
        debian_security=transport.debian_security,
        fetcher=Fetcher(store, client, Sources(client), offline=False),
    )


def _lister(client: Client) -> Any:
    from pipeline.fetch.index import list_files  # slow to import, and only a new lock asks

    def files(project: str) -> Any:
        return [
            package
            for index in client.settings.indexes
            for package in list_files(client, index, project)
        ]

    return files


def _old(checkout: Checkout, name: str) -> SourceLock | None:
    try:
        return read_source_lock(checkout.source_lock_path(name))
    except (LockMissing, LockEdited):
        return None


def _moves(old: SourceLock | None, new: SourceLock) -> list[dict[str, str | None]]:
    """What a lock would change: the archive, its files, the spec that it answers."""

    def facts(lock: SourceLock | None) -> dict[str, str | None]:
        if lock is None:
            return {}
        pin = lock.archive
        return {
            "archive": pin.file,
            "version": pin.version,
            "sha256": pin.sha256[:12],
            "files": str(lock.files),
            "tree": lock.tree,
            "spec": lock.spec,
        }

    before, after = facts(old), facts(new)
    return [
        {"source": new.source, "what": what, "before": before.get(what), "after": after[what]}
        for what in after
        if before.get(what) != after[what]
    ]
