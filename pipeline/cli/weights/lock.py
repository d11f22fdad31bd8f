"""`sm120 weights list` and `lock`: which sets there are, and what the Hub has of them."""

from __future__ import annotations

from typing import Any

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json
from pipeline.cli.options import json_option, lock_check_option, locking_dry_run_option
from pipeline.errors import LockEdited, LockMissing, LockStale, OfflineMiss, SpecInvalid
from pipeline.fetch.http import Client
from pipeline.fetch.settings import plain_settings
from pipeline.lock.sealed import read_or_none
from pipeline.spec.checkout import Checkout
from pipeline.weights.hub import Hub, endpoint, is_offline, saved_token
from pipeline.weights.locking import LockChange, LockResult, diff_locks, look_up
from pipeline.weights.model import (
    FilePin,
    current_lock,
    lock_path,
    read_lock,
    read_spec,
    spec_names,
    write_lock,
)
from pipeline.weights.transfer.fetch import fetch_range
from pipeline.weights.transfer.http_route import HttpRoute, HubRepository


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
    if as_json:
        return say_json(rows)
    for row in rows:
        row["size"] = log.size(row["bytes"]) if "bytes" in row else None
    head = ["name", "repository", "revision", "quant", "lock", "files", "size"]
    click.echo(log.table(head, [[row.get(name) for name in head] for row in rows]))


@click.command("lock")
@click.argument("names", metavar="NAME...", nargs=-1)
@locking_dry_run_option
@lock_check_option
@json_option
@click.pass_context
def lock_sets(
    context: click.Context, names: tuple[str, ...], dry_run: bool, check: bool, as_json: bool
) -> None:
    """Look up the commit of weights, and the size and hash of every file; write their locks.

    Asks the Hub (or HF_ENDPOINT), with HF_TOKEN or the token of `hf auth login`. Nothing is
    written unless all answers belong to one commit.
    """
    checkout = checkout_of(context)
    if check:
        return _check(checkout, names, as_json)
    if not names:
        raise SpecInvalid("no weights are named", "`sm120 weights list` shows the names.")
    answers = []
    # all are looked up before the first is written
    looked_up = {name: _look_up(checkout, name) for name in dict.fromkeys(names)}
    for name, looked in looked_up.items():
        moves = diff_locks(read_or_none(read_lock, lock_path(checkout, name)), looked.lock)
        if not dry_run:
            write_lock(lock_path(checkout, name), looked.lock)
        answers.append(_answer(looked, moves))
        if not as_json:
            _show(looked, moves, dry_run)
    if as_json:
        say_json(answers)


def _look_up(checkout: Checkout, name: str) -> LockResult:
    spec = read_spec(checkout, name)
    client, hub = _transport()

    def fetch(pin: FilePin, commit: str) -> bytes:
        there = HubRepository(hub.endpoint, spec.repository, commit, hub.token)
        routes = [HttpRoute(client, there, "plain HTTP")]
        return b"".join(fetch_range(routes, pin, 0, pin.size_bytes, client=client))

    with log.step(f"Looking up {name}: {spec.repository} at {spec.revision}"):
        return look_up(spec, hub, fetch)


def _transport() -> tuple[Client, Hub]:
    # huggingface_hub's own switch: users who set it expect every tool to obey it
    if is_offline():
        raise OfflineMiss("HF_HUB_OFFLINE is set", "Unset it where the Hub may be asked.")
    settings = plain_settings()
    return Client(settings), Hub(settings, endpoint=endpoint(), token=saved_token())


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
        lock = current_lock(checkout, name)
        count = {"files": len(lock.files), "bytes": lock.size_bytes}
        rows.append({"name": name, "commit": lock.commit, "seal": lock.seal, **count})
    if as_json:
        return say_json(rows)
    for row in rows:
        files = log.count(row["files"], "file")
        click.echo(f"{row['name']}: {files}, commit {row['commit']}, current")
