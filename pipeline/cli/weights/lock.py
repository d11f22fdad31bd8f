"""`sm120 weights list` and `lock`: which sets there are, and what the Hub has of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from pipeline import log
from pipeline.cli.context import checkout_of, say_json
from pipeline.cli.options import json_option, lock_check_option, locking_dry_run_option
from pipeline.errors import LockEdited, LockMissing, LockStale, SpecInvalid
from pipeline.fit.named import named_spec
from pipeline.lock.sealed import read_or_none
from pipeline.spec.checkout import Checkout
from pipeline.weights.disk.lock_folder import lock_folder
from pipeline.weights.locking import LockChange, LockResult, diff_locks
from pipeline.weights.model import (
    WeightsSpec,
    current_lock,
    is_reference,
    kept_locks,
    lock_path,
    read_lock,
    read_spec,
    spec_names,
    spec_of,
    spec_path,
    write_lock,
    write_spec,
)
from pipeline.weights.transfer.lookup import look_up_now


@click.command("list")
@json_option
@click.pass_context
def list_sets(context: click.Context, as_json: bool) -> None:
    """List the weights that this checkout knows, and which are locked."""
    checkout = checkout_of(context)
    rows = []
    for name in spec_names(checkout):
        spec = read_spec(checkout, name)
        row: dict[str, Any] = {
            "name": name,
            "repository": spec.repository,
            "revision": spec.revision,
            "format": spec.format,
            "quant": spec.quant,
            "lock": "current",
        }
        try:
            lock = current_lock(checkout, name)
            row |= {"commit": lock.commit, "files": len(lock.files), "bytes": lock.size_bytes}
        except LockMissing:
            row["lock"] = "missing"
        except LockStale:
            row["lock"] = "stale"
        except LockEdited:
            row["lock"] = "edited"
        rows.append(row)
    rows += _without_spec(checkout, {row["name"] for row in rows})
    if as_json:
        return say_json(rows)
    for row in rows:
        row["size"] = log.size(row["bytes"]) if "bytes" in row else None
    head = ["name", "repository", "revision", "quant", "lock", "files", "size"]
    click.echo(log.table(head, [[row.get(name) for name in head] for row in rows]))


def _without_spec(checkout: Checkout, known: set[str]) -> list[dict[str, Any]]:
    """Locks of models that were named by their repository."""
    return [
        {
            "name": lock.name,
            "repository": lock.repository,
            "lock": "current",
            "commit": lock.commit,
            "files": len(lock.files),
            "bytes": lock.size_bytes,
        }
        for lock in kept_locks(checkout)
        if lock.name not in known
    ]


@click.command("lock")
@click.argument("names", metavar="NAME|ORG/MODEL[@REVISION]|FOLDER...", nargs=-1)
@click.option("--save", metavar="NAME", help="Also write a spec of this name, for ORG/MODEL.")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Files for --save. Repeatable [default: *]."
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Files to leave out, for --save. Repeatable.",
)
@locking_dry_run_option
@lock_check_option
@json_option
@click.pass_context
def lock_sets(
    context: click.Context,
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
        locks = [lock_folder(Path(name).expanduser()) for name in own]
        if as_json:
            return say_json([_answer(LockResult(lock=lock, warnings=[]), []) for lock in locks])
        for name, lock in zip(own, locks, strict=True):
            count, size = log.count(len(lock.files), "file"), log.size(lock.size_bytes)
            click.echo(f"{name}: {count}, {size}, locked as {lock.name}; {lock.seal}")
        return None
    checkout = checkout_of(context)
    if check:
        return _check(checkout, names, as_json)
    if not names:
        raise SpecInvalid("no weights are named", "`sm120 weights list` shows the names.")
    specs = [named_spec(checkout, name) for name in dict.fromkeys(names)]
    if save or include or exclude:
        specs = [_to_save(checkout, names, save, include, exclude)]
    answers = []
    # all are looked up before the first is written
    looked_up = [(spec, look_up_now(spec)) for spec in specs]
    for spec, looked in looked_up:
        path = lock_path(checkout, spec.name)
        moves = diff_locks(read_or_none(read_lock, path), looked.lock)
        if not dry_run:
            # the spec first: a lock without it would be that of a model without a spec
            if save:
                write_spec(spec_path(checkout, save), spec)
            write_lock(path, looked.lock)
        answers.append(_answer(looked, moves))
        if not as_json:
            _show(looked, moves, dry_run)
    if as_json:
        say_json(answers)
    elif save and not dry_run:
        click.echo(f"spec: {spec_path(checkout, save).relative_to(checkout.root)}")


def _to_save(
    checkout: Checkout,
    names: tuple[str, ...],
    save: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> WeightsSpec:
    """A model's spec under a name of the user's."""
    if not save:
        # else nobody could tell later which files the lock leaves out, and why
        raise click.UsageError("--include and --exclude need --save NAME, which writes them down")
    if len(names) != 1 or not is_reference(names[0]):
        raise click.UsageError("--save needs one ORG/MODEL[@REVISION]")
    if save in spec_names(checkout):
        raise SpecInvalid(
            f"{spec_path(checkout, save)}: is there already",
            f"Edit it and run `sm120 weights lock {save}`, or save under another name.",
        )
    changes = {"name": save, "include": list(include) or ["*"], "exclude": list(exclude)}
    try:
        return WeightsSpec.model_validate(spec_of(names[0]).model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{first['loc'][0]}: {first['msg']}"
        if first["loc"] == ("name",):
            what = "a name has at most 80 small letters, digits, dots, plus and minus signs"
        raise click.UsageError(f"--save {save!r}: {what}") from error


def _answer(looked: LockResult, moves: list[LockChange]) -> dict[str, object]:
    lock = looked.lock
    return {
        "name": lock.name,
        "commit": lock.commit,
        "files": len(lock.files),
        "bytes": lock.size_bytes,
        "seal": lock.seal,
        "moves": [move.model_dump() for move in moves],
        "warnings": looked.warnings,
    }


def _show(looked: LockResult, moves: list[LockChange], dry_run: bool) -> None:
    lock = looked.lock
    for warning in looked.warnings:
        log.say(f"warning: {warning}")
    rows = [
        # as short as git and the Hub show a commit
        [m.kind, m.path or "-", (m.before or "-")[:12], (m.after or "-")[:12], _bytes(m)]
        for m in moves
    ]
    if rows:
        click.echo(log.table(["change", "path", "before", "after", "size"], rows))
    verb = "would be locked" if dry_run else "locked"
    changed = log.count(len(moves), "change") if moves else "nothing changed"
    size = log.size(lock.size_bytes)
    click.echo(
        f"{lock.name}: {log.count(len(lock.files), 'file')}, {size}, commit {lock.commit}, {verb};"
        f" {changed}"
    )


def _bytes(move: LockChange) -> str:
    if move.kind == "commit":
        return "-"
    return log.size(move.after_bytes if move.after_bytes is not None else move.before_bytes or 0)


def _check(checkout: Checkout, names: tuple[str, ...], as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    # without names, the sets that have a lock; the others are only specs so far
    locked = (name for name in spec_names(checkout) if lock_path(checkout, name).exists())
    for name in names or locked:
        named_spec(checkout, name)
        lock = current_lock(checkout, name)
        count = {"files": len(lock.files), "bytes": lock.size_bytes}
        rows.append({"name": name, "commit": lock.commit, "seal": lock.seal, **count})
    if as_json:
        return say_json(rows)
    if not rows:
        log.say("no weights are locked yet")
    for row in rows:
        files = log.count(row["files"], "file")
        click.echo(f"{row['name']}: {files}, commit {row['commit']}, current")
