"""`sm120 weights fetch`: from a lock to files with the right bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_of, checkout_or_none, say_json
from pipeline.cli.file_statements import leave_weights_statement, show_statement
from pipeline.cli.options import ANY_PATH, Rate, jobs_option, json_option, offline_option
from pipeline.cli.signing import Signing
from pipeline.cli.weights.places import hints_of_folder
from pipeline.errors import LockMissing
from pipeline.fit.named import named_spec
from pipeline.weights.check.copies import RouteSupply
from pipeline.weights.check.repair import repair_known
from pipeline.weights.disk.install import name_revision
from pipeline.weights.hub import is_offline
from pipeline.weights.model import (
    WeightsLock,
    WeightsSpec,
    chosen_files,
    current_lock,
    is_reference,
    lock_path,
    spec_of,
)
from pipeline.weights.place import Place, kept_lock, new_place, offered_place
from pipeline.weights.transfer.fetch import JOBS, Options, fetch_files
from pipeline.weights.transfer.lookup import look_up_now
from pipeline.weights.transfer.plan import PlannedFile, plan_fetch
from pipeline.weights.transfer.sources import named_folders, open_routes


@click.command("fetch")
@click.argument("name", metavar="NAME|ORG/MODEL[@REVISION]")
@click.option("--to", "folder", type=ANY_PATH, required=True, help="Folder for the files.")
@click.option(
    "--hub-cache", is_flag=True, help="Use the layout of the Hub's own cache; --to is that cache."
)
@click.option(
    "--from",
    "neighbours",
    multiple=True,
    metavar="FOLDER|URL",
    help="Folder, or `weights serve` of another machine, to ask first. Repeatable: all are used.",
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
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave out matching files. Repeatable."
)
@click.option("--dry-run", is_flag=True, help="Show what would be fetched, and write nothing.")
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
    exclude: tuple[str, ...],
    dry_run: bool,
    offline: bool,
    as_json: bool,
) -> None:
    """Download locked weights to a folder. A file appears there only when its hash is right.

    What an earlier run downloaded, even one that was killed, is not downloaded again. The result
    is stated beside the files (.sm120/record.dsse.json), signed where there is a key. Another
    machine gets the token in SM120_NEIGHBOUR_TOKEN, never the Hub's.

    A model that is named as on the Hub needs neither a spec nor a lock: it is looked up once,
    and the folder keeps that commit. With --offline, and where the checkout has no lock, the lock
    in a folder of --from counts.
    """
    # before hours of download: a named key that cannot sign is an error now
    signing = Signing()
    spec, lock = _locked(context, name, folder, neighbours, offline)
    pins = chosen_files(lock, only, exclude)
    place = new_place(folder, lock, hub_cache=hub_cache)
    options = Options(jobs=jobs, limit_bytes_per_s=limit_rate)
    if dry_run:
        return _show_plan(place, plan_fetch(place, pins, options), as_json)
    client, routes = open_routes(lock, neighbours=neighbours, offline=offline)
    with hints_of_folder(
        "name another folder with --to", "Choose a folder you may write with --to."
    ):
        repaired = repair_known(place, pins, RouteSupply(routes, client))
        for file in repaired:
            log.say(f"  {file.path}: {file.error or file.how} ({log.size(file.fetched_bytes)})")
        brought = fetch_files(place, pins, routes, client=client, options=options)
        # after the files: a lock beside a folder tells that the set is there
        place.keep_lock()
        # so that engines which ask the cache for `main` find the locked commit
        name_revision(place, spec.revision)
    size, statement = sum(pin.size_bytes for pin in brought), None
    # a part of a set gives no statement about the whole
    if not only and not exclude:
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
                "repaired": [file.model_dump() for file in repaired],
            }
        )
    right = log.count(len(pins), "file is", "files are")
    summary = f"{right} right, {len(brought)} of them new ({log.size(size)})"
    click.echo(f"{place.snapshot}: {summary}")
    if statement:
        show_statement(statement)


def _locked(
    context: click.Context, name: str, folder: Path, neighbours: Sequence[str], offline: bool
) -> tuple[WeightsSpec, WeightsLock]:
    """The checkout's lock; where it has none, one beside files, else as the Hub has it."""
    known = checkout_or_none(context) if is_reference(name) else checkout_of(context)
    spec = named_spec(known, name) if known else spec_of(name)
    if known and lock_path(known, spec.name).exists():
        return spec, current_lock(known, name)
    if lock := _beside_files(spec, name, folder, neighbours, offline):
        return spec, lock
    if known and not is_reference(name):
        return spec, current_lock(known, name)
    looked = look_up_now(spec, offline=offline)
    for warning in looked.warnings:
        log.say(f"warning: {warning}")
    log.say(f"  {spec.repository}: commit {looked.lock.commit}")
    return spec, looked.lock


def _beside_files(
    spec: WeightsSpec, name: str, folder: Path, neighbours: Sequence[str], offline: bool
) -> WeightsLock | None:
    """The lock that lies at the target or, where the Hub may not be asked, at a source."""
    if is_reference(name) and (lock := kept_lock(folder, spec)):
        log.say(f"{spec.repository}: commit {lock.commit}, as this folder has it")
        return lock
    if not offline and not is_offline():
        return None
    if place := offered_place(named_folders(neighbours), spec):
        commit = f"{spec.repository}: commit {place.lock.commit}"
        log.say(f"{commit}, by the lock in {place.root}, as there is none in a checkout")
        return place.lock
    if is_reference(name):
        return None
    raise LockMissing(
        f"{spec.name}: has no lock, neither in the checkout nor in a folder of --from",
        f"Make it where the Hub can be reached (`sm120 weights lock {name}`), or name with --from a"
        " folder that `sm120 weights fetch` made.",
    )


def _show_plan(place: Place, planned: list[PlannedFile], as_json: bool) -> None:
    n_bytes = sum(file.fetch_bytes for file in planned)
    if as_json:
        return say_json(
            {
                "name": place.lock.name,
                "folder": str(place.snapshot),
                "commit": place.lock.commit,
                "files": [file.model_dump() for file in planned],
                "fetch_bytes": n_bytes,
            }
        )
    rows = [[f.path, log.size(f.size_bytes), f.state, log.size(f.fetch_bytes)] for f in planned]
    click.echo(log.table(["file", "size", "state", "to fetch"], rows))
    here = sum(file.size_bytes for file in planned if file.state == "to be read")
    more = f"; {log.size(here)} are here and would be read" if here else ""
    click.echo(f"{place.snapshot}: {log.size(n_bytes)} would be fetched{more}")
