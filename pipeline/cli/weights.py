"""`sm120 weights`: lock, fetch, verify, scrub, sign and serve sets of weights."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.options import (
    PLAIN_SIZE,
    RATE,
    command,
    file_option,
    flag_option,
    many_option,
    path_option,
    query,
)
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.errors import WeightsDamaged

if TYPE_CHECKING:
    from pipeline.app.weights_hub import LockedSet
    from pipeline.weights.disk.survey import FileFinding
    from pipeline.weights.model import WeightsSpec

_folder = click.argument("folder", metavar="DIR", type=options.EXISTING_FOLDER)
_set = click.option("--set", "name", help="Name of the set, where a Hub cache holds several.")
_full = flag_option("--full", help="Read every file again, even with a receipt.")
_signature = click.option(
    "--signature",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Signature file [default: .sm120/model.sig].",
)


@query
def weights_list_command(workspace: Workspace, as_json: bool) -> None:
    """List the weights that this checkout knows, and which are locked."""
    rows = app.weights_hub.list_sets(workspace)
    if as_json:
        return say_json(rows)
    for row in rows:
        row["size"] = log.size(row["bytes"]) if "bytes" in row else None
    head = ["name", "repository", "revision", "quant", "lock", "files", "size"]
    click.echo(log.table(head, [[row.get(name) for name in head] for row in rows]))


@query
@click.argument("names", metavar="NAME|ORG/MODEL[@REVISION]|FOLDER...", nargs=-1)
@click.option("--save", metavar="NAME", help="Also write a spec of this name, for ORG/MODEL.")
@many_option("--include", metavar="PATTERN", help="Files for --save. Repeatable [default: *].")
@many_option("--exclude", metavar="PATTERN", help="Files to leave out, for --save. Repeatable.")
@options.locking_dry_run_option
@options.lock_check_option
def weights_lock_command(
    workspace: Workspace,
    names: tuple[str, ...],
    save: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    dry_run: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Look up the commit of weights, and the size and hash of every file; write their locks.

    Asks the Hub (or HF_ENDPOINT), with HF_TOKEN or the token of `hf auth login`. Nothing is
    written unless all answers belong to one commit.

    Any model can be named as on the Hub, such as Qwen/Qwen3-0.6B@main: it needs no spec. --save
    writes one, for some of its files (--include, --exclude) or to edit it.

    A FOLDER of your own (./DIR or a whole path) is locked without the Hub: every file is hashed,
    and the lock stays in the folder, so that it can be verified, served and shared.
    """
    if own := [name for name in names if name.startswith((".", "/", "~"))]:
        if len(own) < len(names) or save or include or exclude or check or dry_run:
            raise click.UsageError("a folder is locked whole, by itself and without options")
        from pipeline.weights.disk.receipt import lock_folder
        from pipeline.weights.transfer.lookup import LockResult

        locks = [lock_folder(Path(name).expanduser()) for name in own]
        if as_json:
            results = [LockResult(lock=lock, warnings=[]) for lock in locks]
            return say_json([_lock_json(app.weights_hub.LockedSet(each, [])) for each in results])
        for name, lock in zip(own, locks, strict=True):
            count, size = log.count(len(lock.files), "file"), log.size(lock.size_bytes)
            click.echo(f"{name}: {count}, {size}, locked as {lock.name}; {lock.seal}")
        return None
    if check:
        rows = app.weights_hub.check_weights_locks(workspace, names)
        if as_json:
            return say_json(rows)
        if not rows:
            log.say("no weights are locked yet")
        for row in rows:
            files = log.count(row["files"], "file")
            click.echo(f"{row['name']}: {files}, commit {row['commit']}, current")
        return None
    spec = None
    if names and (save or include or exclude):
        spec = _own_spec(workspace, names, save, {"include": include, "exclude": exclude})
    done = app.weights_hub.lock_sets(workspace, names, spec, dry_run=dry_run)
    if as_json:
        return say_json([_lock_json(each) for each in done])
    for each in done:
        _show_lock(each, dry_run)
        if each.spec_file:
            click.echo(f"spec: {each.spec_file}")


def _own_spec(
    workspace: Workspace, names: tuple[str, ...], save: str | None, patterns: dict[str, Any]
) -> WeightsSpec:
    from pydantic import ValidationError

    from pipeline.weights.model import is_reference

    if not save:
        # else a later reader could not see which files the lock leaves out, and why
        raise click.UsageError("--include and --exclude need --save NAME, which writes them down")
    if len(names) != 1 or not is_reference(names[0]):
        raise click.UsageError("--save needs one ORG/MODEL[@REVISION]")
    try:
        return app.weights_hub.own_spec(workspace, names[0], save, **patterns)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{first['loc'][0]}: {first['msg']}"
        if first["loc"] == ("name",):
            what = "a name has at most 80 small letters, digits, dots, plus and minus signs"
        raise click.UsageError(f"--save {save!r}: {what}") from error


def _lock_json(done: LockedSet) -> dict[str, object]:
    lock = done.looked.lock
    return {
        "name": lock.name,
        "commit": lock.commit,
        "files": len(lock.files),
        "bytes": lock.size_bytes,
        "seal": lock.seal,
        "moves": [move.model_dump() for move in done.moves],
        "warnings": done.looked.warnings,
    }


def _show_lock(done: LockedSet, dry_run: bool) -> None:
    lock, moves = done.looked.lock, done.moves
    for warning in done.looked.warnings:
        log.say(f"warning: {warning}")
    rows = []
    for m in moves:
        n_bytes = m.after_bytes if m.after_bytes is not None else m.before_bytes or 0
        shown = "-" if m.kind == "commit" else log.size(n_bytes)
        # as short as git and the Hub show a commit
        rows.append([m.kind, m.path or "-", (m.before or "-")[:12], (m.after or "-")[:12], shown])
    if rows:
        click.echo(log.table(["change", "path", "before", "after", "size"], rows))
    verb = "would be locked" if dry_run else "locked"
    changed = log.count(len(moves), "change") if moves else "nothing changed"
    size = log.size(lock.size_bytes)
    click.echo(
        f"{lock.name}: {log.count(len(lock.files), 'file')}, {size}, commit {lock.commit}, {verb};"
        f" {changed}"
    )


@query
@click.argument("name", metavar="NAME|ORG/MODEL[@REVISION]")
@path_option("--output", "folder", required=True, help="Folder for the files.")
@flag_option("--hub-cache", help="Use the layout of the Hub's own cache; --output is that cache.")
@many_option(
    "--from",
    "neighbours",
    metavar="FOLDER|URL",
    help="Folder, or `weights serve` of another machine, to ask first. Repeatable: all are used.",
)
@click.option(
    "--peers",
    metavar="INVENTORY|URL,URL...",
    help="Hosts that fetch the same set now: take from them what they have verified.",
)
@click.option(
    "--share",
    metavar="ADDRESS:PORT",
    help="Listen there until all peers are done, and hand on to them what is verified.",
)
@click.option("--limit-rate", type=RATE, help="Most bandwidth of all connections, such as 200MB/s.")
# as JOBS of pipeline.weights.transfer.fetch, which would load the HTTP client
@options.jobs_option("Parallel transfers.", most=64, default=8)
@many_option("--only", metavar="PATTERN", help="Fetch only matching files. Repeatable.")
@many_option("--exclude", metavar="PATTERN", help="Leave out matching files. Repeatable.")
@flag_option("--dry-run", help="Show what would be fetched, and write nothing.")
@options.offline_option
def weights_fetch_command(
    workspace: Workspace, /, name: str, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Download locked weights to a folder. A file appears there only when its hash is right.

    What an earlier run downloaded, even one that was killed, is not downloaded again. The result
    is stated beside the files (.sm120/record.dsse.json), signed where there is a key. Another
    machine gets the token in SM120_NEIGHBOUR_TOKEN, never the Hub's.

    Hosts of a rack that run this with the same --peers, each with --share, take blocks from each
    other, so that the source sends about one copy to all of them. A peer that is gone, slow or has
    wrong bytes costs time only.

    A model that is named as on the Hub needs neither a spec nor a lock: it is looked up once,
    and the folder keeps that commit. With --offline, and where the checkout has no lock, the lock
    in a folder of --from counts.
    """
    request = app.weights_hub.FetchRequest(name, **options)
    if dry_run:
        plan = app.weights_hub.plan_set(workspace, request)
        place, files = plan.place, plan.files
        n_bytes = sum(file.fetch_bytes for file in files)
        if as_json:
            lock, rows = place.lock, [file.model_dump() for file in files]
            about = {"name": lock.name, "folder": str(place.snapshot), "commit": lock.commit}
            return say_json({**about, "files": rows, "fetch_bytes": n_bytes})
        table = [[f.path, log.size(f.size_bytes), f.state, log.size(f.fetch_bytes)] for f in files]
        click.echo(log.table(["file", "size", "state", "to fetch"], table))
        here = sum(file.size_bytes for file in files if file.state == "to be read")
        more = f"; {log.size(here)} are here and would be read" if here else ""
        return click.echo(f"{place.snapshot}: {log.size(n_bytes)} would be fetched{more}")
    done = app.weights_hub.fetch(workspace, request)
    place, statement = done.place, done.statement
    size = sum(pin.size_bytes for pin in done.brought)
    if as_json:
        return say_json(
            {
                "statement": statement._asdict() if statement else None,
                "name": name,
                "folder": str(place.snapshot),
                "commit": place.lock.commit,
                "files": len(done.pins),
                "brought": [pin.path for pin in done.brought],
                "brought_bytes": size,
                "repaired": [file.model_dump() for file in done.repaired],
                "origin_bytes": done.origin_bytes,
                "peer_bytes": done.peer_bytes,
            }
        )
    right = log.count(len(done.pins), "file is", "files are")
    summary = f"{right} right, {len(done.brought)} of them new ({log.size(size)})"
    if done.origin_bytes is not None and done.peer_bytes is not None:
        summary += f"; {log.size(done.peer_bytes)} from peers, {log.size(done.origin_bytes)} not"
    click.echo(f"{place.snapshot}: {summary}")
    if statement:
        click.echo(f"statement: {statement.file}, {statement.state}")


@query
@click.argument("folder", metavar="DIR", type=options.EXISTING_FOLDER)
@file_option("--lock", "lock_file", help="Lock file to use instead of its own.")
@many_option("--only", metavar="PATTERN", help="Check only matching files. Repeatable.")
@many_option("--exclude", metavar="PATTERN", help="Leave out matching files. Repeatable.")
@flag_option("--full", help="Read every file again, even with a receipt.")
@flag_option("--repair", "wants_repair", help="Download what is damaged, and only that.")
@flag_option("--dry-run", help="Only show what --repair would download.")
@many_option(
    "--from",
    "neighbours",
    metavar="FOLDER|URL",
    help="For --repair: folder or `weights serve` to ask first. Repeatable.",
)
@options.offline_option
@options.jobs_option("Files to read in parallel [default: one for each core].", most=256)
@options.trust_option
def weights_verify_command(
    workspace: Workspace,
    /,
    wants_repair: bool,
    dry_run: bool,
    neighbours: tuple[str, ...],
    as_json: bool,
    **options: Any,
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
    done = app.weights.verify_weights(
        workspace, repair=wants_repair, dry_run=dry_run, neighbours=neighbours, **options
    )
    pairs = list(zip(done.reports, done.backings, strict=True))
    if as_json:
        say_json(
            {
                "whole": all(report.is_whole for report in done.reports),
                "sets": [
                    report.model_dump() | {"whole": report.is_whole} | backing.model_dump()
                    for report, backing in pairs
                ],
                "repaired": [m.model_dump() for m in done.repaired],
                "statements": [each._asdict() for each in done.statements],
            }
        )
        return done.require_whole()
    for each in done.statements:
        click.echo(f"statement: {each.file}, {each.state}")
    if done.repaired:
        rows = [[m.path, m.error or m.how, log.size(m.fetched_bytes)] for m in done.repaired]
        click.echo(log.table(["file", "repair", "fetched"], rows) + "\n")
    _show_findings([finding for report in done.reports for finding in report.findings])
    for report, backing in pairs:
        if report.is_whole:
            read = f"{report.files_read} read, {report.by_receipt} by receipt"
            click.echo(
                f"{report.name}: {log.count(report.files, 'file')}, {log.size(report.size_bytes)},"
                f" as locked ({read}, {log.seconds(report.seconds)})"
            )
        click.echo(f"{report.name}: {backing.sentence()}")
    done.require_whole()


def _show_findings(findings: Sequence[FileFinding]) -> None:
    if findings:
        rows = [[f.kind, f.path, f.detail] for f in findings]
        click.echo(log.table(["problem", "file", "reason"], rows) + "\n")


@query
@click.argument("folders", metavar="DIR...", type=options.EXISTING_FOLDER, nargs=-1, required=True)
@click.option(
    "--every-days",
    type=click.IntRange(1, 3650),
    default=30,
    help="Days in which every file is read once.",
)
@click.option("--budget", type=PLAIN_SIZE, help="Begin no file after this much was read (500G).")
def weights_scrub_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Read a part of the files from the disk, so that all are read every N days.

    Meant for a nightly timer: it runs at low priority and remembers what it has read.
    """
    slices = app.weights.scrub_weights(workspace, **options)
    findings = [finding for s in slices for finding in s.findings]
    if as_json:
        whole = not any(finding.damage for finding in findings)
        say_json({"whole": whole, "sets": [s.model_dump() for s in slices]})
        return app.weights.require_whole(slices)
    _show_findings(findings)
    for s in slices:
        late = f", {log.count(len(s.overdue), 'file is', 'files are')} overdue" if s.overdue else ""
        click.echo(
            f"{s.name}: {log.count(len(s.read), 'file')}, {log.size(s.bytes_read)} read;"
            f" the longest unread file was read {s.oldest_days} days ago{late}"
        )
    app.weights.require_whole(slices)


@query
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=options.EXISTING_FOLDER)
# closed by default: the licences of many weights forbid to hand them on
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port",
    default=8080,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 takes a free one.",
)
@file_option("--token-file", help="File of tokens that may read, one on each line.")
@file_option("--tls-cert", help="Certificate (chain) for HTTPS, PEM.")
@file_option("--tls-key", help="Key of the certificate, PEM.")
def weights_serve_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Serve folders of locked weights as a read-only Hub, until Ctrl-C.

    Clients set HF_ENDPOINT to the printed address. Only files of the locks are served, and each
    only while its bytes are proved: by the receipt of `weights verify`, or by a background check.
    """
    if options["tls_key"] and not options["tls_cert"]:
        raise click.UsageError("--tls-key needs --tls-cert")
    with app.weights_hub.serve_hub(workspace, **options) as hub:
        snapshots = hub.sets.snapshots.values()
        if as_json:
            sets = [
                {"repository": s.repository, "commit": s.commit, "files": len(s.files)}
                for s in snapshots
            ]
            # one line, at once: a program waits for it before it starts clients
            click.echo(json.dumps({"endpoint": hub.endpoint, "pid": os.getpid(), "sets": sets}))
        else:
            for snapshot in snapshots:
                size = log.size(sum(held.pin.size_bytes for held in snapshot.files.values()))
                where = f"{snapshot.repository} at {snapshot.commit[:12]}"
                log.say(f"serving {where}: {log.count(len(snapshot.files), 'file')}, {size}")
            click.echo(f"export HF_ENDPOINT={hub.endpoint}")
        if hub.is_open:
            log.say(
                "everybody who reaches this address can read the weights; --token-file restricts"
                " that"
            )
        hub.run()


@query
@_folder
@click.argument("target", metavar="[REGISTRY/REPO[:TAG]]", required=False)
@_set
@flag_option("--dry-run", help="Show what would be sent, and send nothing.")
@options.registry_options
def weights_image_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Push a set as a plain OCI image, for image volumes of Kubernetes; or print its digest.

    Every large file is an uncompressed layer, read from where it lies: no copy is made. Each is
    compared with its lock first. The digest follows from the lock: equal sets are equal images.
    `sm120 render --as kubernetes --weights-image REF@DIGEST` mounts it.
    """
    place, image, done = app.registry.publish_set(workspace, **options)
    layers = next(iter(image.images.values())).layers
    size = sum(layer.size_bytes for layer in layers)
    if as_json:
        platforms = {platform: each.digest for platform, each in image.images.items()}
        body = {"name": place.lock.name, "digest": image.root.digest, "platforms": platforms}
        sent = {"sent_bytes": done.sent_bytes, "reference": done.reference} if done else {}
        return say_json({**body, "layers": len(layers), "bytes": size, **sent})
    click.echo(
        f"{place.lock.name}: {log.count(len(layers), 'layer')}, {log.size(size)},"
        f" {image.root.digest}"
    )
    if done is not None:
        verb = "would be sent" if done.dry_run else "sent"
        click.echo(f"{log.size(done.sent_bytes)} {verb} to {done.reference}")


@query
@_folder
@file_option("--key", required=True, help="Private key, PEM [SM120_KEY_PASSPHRASE].")
@_signature
@_set
@_full
def weights_sign_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Sign a whole set in the OpenSSF model-signing format.

    Files that a receipt vouches for are not read again. The stock tool accepts the signature:
    `model_signing verify key DIR --signature SIG --public_key KEY.pub`.
    """
    place, done = app.weights.sign_weights(workspace, **options)
    if as_json:
        return say_json({**asdict(done), "signature": str(done.signature)})
    for path in done.not_covered:
        log.say(f"not covered by the format: {path}")
    # the Hub's cache consists of symlinks, which the tool refuses by default
    links = " --allow_symlinks" if place.hub_cache else ""
    click.echo(
        f"signed {log.count(done.files, 'file')} ({done.files_read} read) with key {done.key[:16]}"
    )
    log.say("to check it with the format's own tool:")
    log.say(
        f"  model_signing verify key {place.snapshot} --signature {done.signature}"
        f" --public_key KEY.pub{links}"
    )


@query
@_folder
@file_option("--public-key", required=True, help="Public key of the signer, PEM.")
@_signature
@_set
@_full
def weights_check_signature_command(workspace: Workspace, /, as_json: bool, **options: Any) -> None:
    """Check a folder against a model-signing signature, whoever made it."""
    done = app.weights.check_signature(workspace, **options)
    if as_json:
        return say_json({**asdict(done), "signature": str(done.signature)})
    for path in done.not_covered:
        log.say(f"not covered by the signature: {path}")
    click.echo(
        f"{log.count(done.files, 'file is', 'files are')} as signed ({done.files_read} read),"
        f" key {done.key[:16]}"
    )


@command
@_folder
@_set
@_full
@options.key_option
def weights_attest_command(workspace: Workspace, /, **options: Any) -> None:
    """Print what a set is and how it was verified, as an in-toto statement.

    With a key it is also signed and kept beside the set, where `sm120 verify DIR` looks for it,
    in place of the one that `fetch` or `verify` left.
    """
    place, verification, statement, signed = app.weights.attest_set(workspace, **options)
    # printed also where the set is damaged: that, too, is a statement about it
    say_json(statement.as_json())
    if signed:
        log.say(f"signed and kept as {signed}")
    if verification.result == "damaged":
        raise WeightsDamaged(f"{place.lock.name}: {'; '.join(verification.why)}")
    if verification.result != "verified":
        log.say(f"{verification.result}: {'; '.join(verification.why)}")
