"""`sm120 weights fetch`: from a lock to files that are what it says."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.common import checkout_of, json_option, offline_option, say_json
from pipeline.cli.signing import Signing
from pipeline.cli.statements import leave_weights_statement, say_statement
from pipeline.errors import StoreUnwritable

_UNITS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
}


class Rate(click.ParamType[float]):
    """A bandwidth such as 200MB/s."""

    name = "rate"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Bytes a second."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMG]i?|)B?(?:/s)?", str(value))
        if found is None or float(found[1]) <= 0:
            self.fail(f"{value!r}: write a rate as 200MB/s", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


@click.command("fetch")
@click.argument("name")
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True)
@click.option("--hub-cache", is_flag=True, help="Lay them out as the Hub's own cache: --to is it.")
@click.option(
    "--from",
    "neighbours",
    multiple=True,
    metavar="FOLDER|URL",
    help="A folder, or a neighbour's `weights serve`, that is asked first. Repeatable.",
)
@click.option("--limit", type=Rate(), help="At most so much over all connections, e.g. 200MB/s.")
@click.option("--jobs", type=click.IntRange(1, 64), help="Connections at a time [8].")
@click.option("--only", multiple=True, metavar="PATTERN", help="Only matching files. Repeatable.")
@offline_option
@json_option
@click.pass_context
def fetch_set(
    context: click.Context,
    name: str,
    folder: Path,
    hub_cache: bool,
    neighbours: tuple[str, ...],
    limit: float | None,
    jobs: int | None,
    only: tuple[str, ...],
    offline: bool,
    as_json: bool,
) -> None:
    """Bring locked weights to a folder; no file stands there before its hash is right.

    What an earlier run brought, even one that was killed, is not brought again. What was found is
    stated beside the files (.sm120/record.dsse.json), signed where there is a key. A neighbour is
    shown the token in SM120_NEIGHBOUR_TOKEN, never the Hub's.
    """
    from pipeline.weights.disk.install import name_revision
    from pipeline.weights.model import chosen_files, current_lock, read_spec
    from pipeline.weights.place import new_place
    from pipeline.weights.transfer.fetch import JOBS, Options, fetch_files
    from pipeline.weights.transfer.sources import open_routes

    checkout, signing = checkout_of(context), Signing()
    lock = current_lock(checkout, name)
    pins = chosen_files(lock, only)
    place = new_place(folder, lock, hub_cache=hub_cache)
    client, routes = open_routes(lock, neighbours=neighbours, offline=offline)
    options = Options(jobs=jobs or JOBS, limit_bytes_per_s=limit)
    try:
        brought = fetch_files(place, pins, routes, client=client, options=options)
        place.keep_lock()
        name_revision(place, read_spec(checkout, name).revision)
    except StoreUnwritable as error:
        if error.hint != StoreUnwritable.hint:
            raise
        raise StoreUnwritable(str(error), "Choose a folder you may write with --to.") from error
    size, said = sum(pin.size_bytes for pin in brought), None
    if not only:
        kept = len(pins) - len(brought)
        said = leave_weights_statement(place, signing, read=len(brought), by_receipt=kept)
    if as_json:
        return say_json(
            {
                "statement": said._asdict() if said else None,
                "name": name,
                "folder": str(place.snapshot),
                "commit": lock.commit,
                "files": len(pins),
                "brought": [pin.path for pin in brought],
                "brought_bytes": size,
            }
        )
    here = f"{len(pins)} files are right, {len(brought)} of them new ({log.size(size)})"
    click.echo(f"{place.snapshot}: {here}")
    if said:
        say_statement(said)
