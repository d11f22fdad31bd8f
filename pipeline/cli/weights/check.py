"""`sm120 weights verify` and `scrub`: whether files are still as locked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.cli.context import say_json
from pipeline.cli.file_statements import LeftBeside, leave_weights_statement, show_statement
from pipeline.cli.options import (
    EXISTING_FILE,
    EXISTING_FOLDER,
    Size,
    jobs_option,
    json_option,
    offline_option,
    trust_option,
)
from pipeline.cli.signing import Signing
from pipeline.cli.weights.places import backing_of, hints_of_folder, places_in, signed_backing_of
from pipeline.errors import WeightsDamaged, WeightsUnknown
from pipeline.weights.check.backing import Backing
from pipeline.weights.check.scrub import Pace, lower_priority
from pipeline.weights.check.scrub import scrub as read_slice
from pipeline.weights.check.verify import Checked, VerifyOptions, VerifyReport
from pipeline.weights.check.verify import verify as prove
from pipeline.weights.disk.hashing import cores
from pipeline.weights.disk.survey import FileFinding
from pipeline.weights.model import read_lock
from pipeline.weights.place import Place, lock_place
from pipeline.weights.sign.record import reasons

if TYPE_CHECKING:
    from pipeline.weights.check.repair import Repaired


_NO_LOCK = "Name a lock as `sm120 weights lock` writes it: lockfiles/weights/NAME.lock.yaml."
_WRITABLE = "mount it for writing, or fetch the set to another disk"
_MODE = "Change its owner or mode: this command keeps what it found out beside the files."
_ASIDE = "`sm120 weights verify DIR --repair` moves what no lock names to DIR/.sm120/aside."
_NO_SOURCE = "A repair needs a source that has the right bytes: name another one with --from"


@click.command()
@click.argument("folder", metavar="DIR", type=EXISTING_FOLDER)
@click.option(
    "--lock", "lock_file", type=EXISTING_FILE, help="Lock file to use instead of its own."
)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Check only matching files. Repeatable."
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave out matching files. Repeatable."
)
@click.option("--full", is_flag=True, help="Read every file again, even with a receipt.")
@click.option(
    "--repair", "wants_repair", is_flag=True, help="Download what is damaged, and only that."
)
@click.option("--dry-run", is_flag=True, help="Only show what --repair would download.")
@click.option(
    "--from",
    "neighbours",
    multiple=True,
    metavar="FOLDER|URL",
    help="For --repair: folder or `weights serve` to ask first. Repeatable.",
)
@offline_option
@jobs_option("Files to read in parallel [default: one for each core].", most=256)
@trust_option
@json_option
@click.pass_context
def verify(
    context: click.Context,
    folder: Path,
    lock_file: Path | None,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    full: bool,
    wants_repair: bool,
    dry_run: bool,
    neighbours: tuple[str, ...],
    offline: bool,
    jobs: int | None,
    trust_path: Path | None,
    as_json: bool,
) -> None:
    """Check the files of a folder against their lock: offline, on all cores.

    A lock beside the files is not used if the checkout's lock or a trusted signature contradicts
    it; if neither knows it, the result warns that nothing vouches for the lock.

    The result, good or bad, is stated beside the files (.sm120/record.dsse.json), signed where
    there is a key. A statement that somebody else signed is left as it is.
    """
    if dry_run and not wants_repair:
        raise click.UsageError("--dry-run needs --repair: without it nothing is changed anyway")
    if neighbours and not wants_repair:
        raise click.UsageError("--from needs --repair: without it nothing is asked for files")
    signing = Signing()
    request = VerifyOptions(only=only, exclude=exclude, full=full, jobs=jobs or cores())
    places = _places(context, folder, lock_file)
    if lock_file is None:
        backings = [signed_backing_of(context, place, trust_path) for place in places]
    else:
        # the user vouches for a lock by naming it
        backings = [Backing(lock_from="given") for _ in places]
    checked = [_verified(place, request, places) for place in places]
    repaired: list[Repaired] = []
    # after the whole check: what is damaged is known before anything is downloaded
    if wants_repair:
        for i, place in enumerate(places):
            if not checked[i].report.is_whole:
                with hints_of_folder(_WRITABLE, _MODE):
                    repaired += _repaired(place, checked[i], neighbours, offline, dry_run)
                if dry_run:
                    continue
                # without --full: what was read a moment ago has a receipt
                again = VerifyOptions(only=only, exclude=exclude, jobs=request.jobs)
                checked[i] = _verified(place, again, places)
    reports = [c.report for c in checked]
    # a part of a set, or a lock that was named here, gives no statement about the whole set
    is_all = not only and not exclude and lock_file is None
    stated = [_stated(p, r, signing) for p, r in zip(places, reports, strict=True) if is_all]
    if as_json:
        _answer_json(reports, repaired, backings, stated)
    else:
        for each in stated:
            show_statement(each)
        _answer(reports, repaired, backings)
    # a repair that was tried in vain is not what to try next
    tried = f"{_NO_SOURCE}{', or leave out --offline' if offline else ''}."
    _require_whole(reports, tried if wants_repair and not dry_run else "")


def _stated(place: Place, report: VerifyReport, signing: Signing) -> LeftBeside:
    return leave_weights_statement(
        place,
        signing,
        read=report.files_read,
        by_receipt=report.by_receipt,
        why=reasons(report.damage),
    )


def _places(context: click.Context, folder: Path, lock_file: Path | None) -> list[Place]:
    if lock_file is None:
        try:
            return places_in(context, folder)
        # only this verb can take a lock from elsewhere, so only its hint names the option
        except WeightsUnknown as error:
            hint = f"{error.hint} --lock names a lock that is elsewhere."
            raise WeightsUnknown(str(error), hint) from error
    return [lock_place(folder, read_lock(lock_file, edited=_NO_LOCK))]


def _verified(place: Place, request: VerifyOptions, places: list[Place]) -> Checked:
    with log.step(f"Verifying {place.lock.name}, {log.size(place.lock.size_bytes)}"):
        # others of the folder: files that belong to them are no strangers
        return prove(place, request, [p for p in places if p != place])


def _repaired(
    place: Place, checked: Checked, neighbours: tuple[str, ...], offline: bool, dry_run: bool
) -> list[Repaired]:
    # these load the HTTP client, which a verify that finds nothing wrong does not need
    from pipeline.weights.check.copies import RouteSupply
    from pipeline.weights.check.repair import repair
    from pipeline.weights.transfer.sources import open_routes

    client, routes = open_routes(place.lock, neighbours=neighbours, offline=offline)
    verb = "What a repair would take" if dry_run else "Repairing"
    with log.step(f"{verb}: {place.lock.name}"):
        return repair(place, checked, RouteSupply(routes, client), dry_run=dry_run)


def _answer(
    reports: Sequence[VerifyReport], repaired: Sequence[Repaired], backings: Sequence[Backing]
) -> None:
    if repaired:
        rows = [[m.path, m.error or m.how, log.size(m.fetched_bytes)] for m in repaired]
        click.echo(log.table(["file", "repair", "fetched"], rows) + "\n")
    findings = [finding for report in reports for finding in report.findings]
    if findings:
        click.echo(_table(findings) + "\n")
    for report, backing in zip(reports, backings, strict=True):
        if report.is_whole:
            read = f"{report.files_read} read, {report.by_receipt} by receipt"
            click.echo(
                f"{report.name}: {log.count(report.files, 'file')}, {log.size(report.size_bytes)},"
                f" as locked ({read}, {log.seconds(report.seconds)})"
            )
        click.echo(f"{report.name}: {backing.sentence()}")


def _table(findings: Sequence[FileFinding]) -> str:
    rows = [[f.kind, f.path, f.detail] for f in findings]
    return log.table(["problem", "file", "reason"], rows)


def _require_whole(reports: Sequence[Any], hint: str = "") -> None:
    for report in reports:
        damage = [finding for finding in report.findings if finding.damage]
        if damage:
            only_extra = all(finding.kind == "extra" for finding in damage)
            hint = hint or (_ASIDE if only_extra else "")
            raise WeightsDamaged(f"{report.name}: {_counted(damage)} ({report.root})", hint)


def _counted(damage: Sequence[FileFinding]) -> str:
    counts = Counter(finding.kind for finding in damage)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    files = log.count(len({f.path for f in damage}), "file is", "files are")
    return f"{files} not as locked: {kinds}"


def _answer_json(
    reports: Sequence[VerifyReport],
    repaired: Sequence[Repaired],
    backings: Sequence[Backing],
    stated: Sequence[LeftBeside],
) -> None:
    whole = all(report.is_whole for report in reports)
    say_json(
        {
            "whole": whole,
            "sets": [
                report.model_dump() | {"whole": report.is_whole} | backing.model_dump()
                for report, backing in zip(reports, backings, strict=True)
            ],
            "repaired": [m.model_dump() for m in repaired],
            "statements": [each._asdict() for each in stated],
        }
    )


@click.command()
@click.argument("folders", metavar="DIR...", type=EXISTING_FOLDER, nargs=-1, required=True)
@click.option(
    "--every-days",
    type=click.IntRange(1, 3650),
    default=30,
    show_default=True,
    help="Days in which every file is read once.",
)
@click.option(
    "--budget", type=Size(bare=True), help="Begin no file after this much was read (500G)."
)
@json_option
@click.pass_context
def scrub(
    context: click.Context,
    folders: tuple[Path, ...],
    every_days: int,
    budget: int | None,
    as_json: bool,
) -> None:
    """Read a part of the files from the disk, so that all are read every N days.

    Meant for a nightly timer: it runs at low priority and remembers what it has read.
    """
    left = budget
    # it runs for hours beside engines that answer users
    lower_priority()
    slices = []
    for folder in folders:
        places = places_in(context, folder)
        for place in places:
            log.say(f"{place.lock.name}: {backing_of(context, place, strict=False).sentence()}")
            with log.step(f"Scrubbing {place.lock.name}"):
                others = [p for p in places if p != place]
                with hints_of_folder(_WRITABLE, _MODE):
                    done = read_slice(place, Pace(every_days, left), int(time.time()), others)
            # one budget for all folders, which share one night
            left = None if left is None else max(0, left - done.bytes_read)
            slices.append(done)
    damaged = any(finding.damage for s in slices for finding in s.findings)
    if as_json:
        say_json({"whole": not damaged, "sets": [s.model_dump() for s in slices]})
        return _require_whole(slices)
    findings = [finding for s in slices for finding in s.findings]
    if findings:
        click.echo(_table(findings) + "\n")
    for s in slices:
        late = f", {log.count(len(s.overdue), 'file is', 'files are')} overdue" if s.overdue else ""
        click.echo(
            f"{s.name}: {log.count(len(s.read), 'file')}, {log.size(s.bytes_read)} read;"
            f" the longest unread file was read {s.oldest_days} days ago{late}"
        )
    _require_whole(slices)
