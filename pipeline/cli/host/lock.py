"""`sm120 host lock`: the packages that hosts get, from a signed repository."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json, show_moves
from pipeline.cli.options import json_option, lock_check_option, locking_dry_run_option
from pipeline.errors import LockMissing, SourceUnreachable, SpecInvalid
from pipeline.fetch.http import Client
from pipeline.fetch.settings import read_settings
from pipeline.fetch.sources import read_below
from pipeline.lock.host import Repository, lock_target, read_package_index, refused_key
from pipeline.lock.host_model import (
    TargetLock,
    current_host_lock,
    host_lock_path,
    read_host_lock,
    sealed_host,
    write_host_lock,
)
from pipeline.lock.sealed import read_or_none
from pipeline.spec.checkout import Checkout
from pipeline.spec.host import HostSpec, read_host_spec


@click.command()
@click.option("--target", help="System and processor, such as ubuntu-24.04/amd64.")
@click.option(
    "--repository",
    "address",
    envvar="SM120_HOST_REPOSITORY",
    help="URL or folder of NVIDIA's repository for that system, or of a mirror.",
)
@click.option(
    "--keyring",
    type=click.Path(path_type=Path),
    envvar="SM120_HOST_KEYRING",
    help="Public key of the repository, armored or binary.",
)
@click.option("--suite", help="Suite of the repository, where it is not a flat one.")
@click.option(
    "--component",
    "components",
    multiple=True,
    default=["main"],
    show_default=True,
    help="Component of the suite. Repeatable.",
)
@locking_dry_run_option
@lock_check_option
@json_option
@click.pass_context
def lock(
    context: click.Context,
    target: str | None,
    address: str | None,
    keyring: Path | None,
    suite: str | None,
    components: tuple[str, ...],
    dry_run: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Look up exact packages for lockfiles/host.yaml and write lockfiles/host.lock.yaml.

    One run locks one system; the others in the lock stay as they are. The lock names no download
    address, so a mirror in a closed network serves as well as NVIDIA's own repository.
    """
    checkout = checkout_of(context)
    spec = read_host_spec(checkout)
    if check:
        return _check(checkout, spec, target, as_json)
    # not `required`: --check needs none of them
    if target is None or address is None or keyring is None:
        raise SpecInvalid(
            "a lock needs a system, a repository and its key",
            "sm120 host lock --target ubuntu-24.04/amd64 --repository ADDRESS --keyring KEY",
        )
    if target not in spec.targets:
        raise SpecInvalid(
            f"lockfiles/host.yaml does not name {target} (only {', '.join(spec.targets)})",
            "Choose one of its targets, or add this one.",
        )
    with log.step(f"Locking the packages of {target}"):
        read = partial(read_below, Client(read_settings()), [address])
        repository = Repository(read, keyring, suite, tuple(components))
        try:
            index = read_package_index(repository, target.partition("/")[2])
        except SourceUnreachable as error:
            # the general hint speaks of the sources of images
            hint = "Check --repository, --suite and the network, then run it again."
            raise SourceUnreachable(str(error), hint) from error
        new = lock_target(spec, target, index)
    # after locking: the lock itself is right, only these hosts cannot use this repository
    _warn_of_key(target, refused_key(target, index))
    path = host_lock_path(checkout)
    old = read_or_none(read_host_lock, path)
    # pins that answer another spec are dropped, not kept beside the new ones
    kept = old.targets if old and old.spec == spec.digest() else {}
    dropped = sorted(set(old.targets) - {target, *kept}) if old else []
    if not dry_run:
        write_host_lock(path, sealed_host(spec, {**kept, target: new}))
    if dropped:
        log.say(
            f"Warning: host.yaml changed since {', '.join(dropped)} was locked, so the new lock\n"
            "leaves it out. Lock it again: `sm120 host lock --target TARGET` for each."
        )
    moves = _moves(old.targets.get(target) if old else None, new)
    if as_json:
        return say_json(moves)
    show_moves(["package", "before", "after"], [[*m.values()] for m in moves], dry_run)


def _warn_of_key(target: str, key: str) -> None:
    """Warn before hosts are touched that apt there would refuse this repository."""
    if key:
        log.say(
            f"Warning: apt on {target} will refuse this repository: its key {key} is bound by\n"
            "SHA-1 only, which apt there rejects since 2026-02-01. Use the repository that NVIDIA\n"
            "signs with a newer key for this system, or a mirror that you sign yourself;\n"
            "ansible/README.md shows the ways."
        )


def _moves(before: TargetLock | None, after: TargetLock) -> list[dict[str, str | None]]:
    old, new = before.pins() if before else {}, after.pins()
    return [
        {
            "name": name,
            "before": old[name].version if name in old else None,
            "after": new[name].version if name in new else None,
        }
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _check(checkout: Checkout, spec: HostSpec, target: str | None, as_json: bool) -> None:
    lock_file = current_host_lock(host_lock_path(checkout), spec)
    if target is not None and target not in lock_file.targets:
        raise LockMissing(
            f"host.lock.yaml: has no packages for {target}", "Make them with `sm120 host lock`."
        )
    rows = {name: len(each.pins()) for name, each in lock_file.targets.items()}
    if as_json:
        return say_json({"seal": lock_file.seal, "spec": lock_file.spec, "targets": rows})
    for name, count in rows.items():
        click.echo(f"{name}: {log.count(count, 'package')}, current")
