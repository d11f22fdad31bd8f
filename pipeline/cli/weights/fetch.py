"""`sm120 weights fetch`: from a lock to files with the right bytes."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json
from pipeline.cli.file_statements import leave_weights_statement, show_statement
from pipeline.cli.options import ANY_PATH, Rate, jobs_option, json_option, offline_option
from pipeline.cli.signing import Signing
from pipeline.errors import StoreUnwritable
from pipeline.weights.disk.install import name_revision
from pipeline.weights.model import chosen_files, current_lock, read_spec
from pipeline.weights.place import new_place
from pipeline.weights.transfer.fetch import JOBS, Options, fetch_files
from pipeline.weights.transfer.sources import open_routes


@click.command("fetch")
@click.argument("name", metavar="NAME")
@click.option("--to", "folder", type=ANY_PATH, required=True, help="Folder for the files.")
@click.option(
    "--hub-cache", is_flag=True, help="Use the layout of the Hub's own cache; --to is that cache."
)
@click.option(
    "--from",
    "neighbours",
    multiple=True,
    metavar="FOLDER|URL",
    help="Folder, or `weights serve` of another machine, to ask first. Repeatable.",
)
@click.option(
    "--limit-rate",
    type=Rate(bare=True),
    help="Most bandwidth of all connections, such as 200MB/s.",
)
@jobs_option("Parallel transfers.", most=64, default=JOBS)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Fetch only matching files. Repeatable."
)
@offline_option
@json_option
@click.pass_context
def fetch_set(
    context: click.Context,
    name: str,
    folder: Path,
    hub_cache: bool,
    neighbours: tuple[str, ...],
    limit_rate: int | None,
    jobs: int,
    only: tuple[str, ...],
    offline: bool,
    as_json: bool,
) -> None:
    """Download locked weights to a folder. A file appears there only when its hash is right.

    What an earlier run downloaded, even one that was killed, is not downloaded again. The result
    is stated beside the files (.sm120/record.dsse.json), signed where there is a key. Another
    machine gets the token in SM120_NEIGHBOUR_TOKEN, never the Hub's.
    """
    # before hours of download: a named key that cannot sign is an error now
    checkout, signing = checkout_of(context), Signing()
    lock = current_lock(checkout, name)
    pins = chosen_files(lock, only)
    place = new_place(folder, lock, hub_cache=hub_cache)
    client, routes = open_routes(lock, neighbours=neighbours, offline=offline)
    options = Options(jobs=jobs, limit_bytes_per_s=limit_rate)
    try:
        brought = fetch_files(place, pins, routes, client=client, options=options)
        # after the files: a lock beside a folder tells that the set is there
        place.keep_lock()
        # so that engines which ask the cache for `main` find the locked commit
        name_revision(place, read_spec(checkout, name).revision)
    except StoreUnwritable as error:
        # the general hint speaks of the store, but weights lie where --to names
        if error.hint != StoreUnwritable.hint:
            raise
        raise StoreUnwritable(str(error), "Choose a folder you may write with --to.") from error
    size, statement = sum(pin.size_bytes for pin in brought), None
    # a part of a set gives no statement about the whole
    if not only:
        kept = len(pins) - len(brought)
        statement = leave_weights_statement(place, signing, read=len(brought), by_receipt=kept)
    if as_json:
        return say_json(
            {
                "statement": statement._asdict() if statement else None,
                "name": name,
                "folder": str(place.snapshot),
                "commit": lock.commit,
                "files": len(pins),
                "brought": [pin.path for pin in brought],
                "brought_bytes": size,
            }
        )
    right = log.count(len(pins), "file is", "files are")
    summary = f"{right} right, {len(brought)} of them new ({log.size(size)})"
    click.echo(f"{place.snapshot}: {summary}")
    if statement:
        show_statement(statement)
