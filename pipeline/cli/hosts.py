"""`sm120 host`: what a host is to have, locked from a signed repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import checkout_of, json_option, say_json
from pipeline.cli.host_check import HOST_COMMANDS
from pipeline.cli.host_provision import provision, record, rollback
from pipeline.cli.host_verify import verify
from pipeline.errors import LockEdited, LockMissing, SpecInvalid

if TYPE_CHECKING:
    from pipeline.lock.host import Repository
    from pipeline.lock.host_model import HostLock, TargetLock
    from pipeline.spec.checkout import Checkout
    from pipeline.spec.host import HostSpec

Row = dict[str, str | None]

_EPILOG = """\b
The usual way through, once for each system of your hosts:
  sm120 host lock --target ubuntu-24.04/amd64 --repository ADDRESS --keyring KEY
  nox -s provision -- -i INVENTORY
  nox -s verify-hosts -- -i INVENTORY
  sm120 host facts           what this host is
  sm120 host check           prove that it works: rules, then copies and all_reduce
"""


@click.group(epilog=_EPILOG)
def host() -> None:
    """Lock what hosts get, say what they are, and prove that they work."""


for command in (*HOST_COMMANDS, provision, rollback, verify, record):
    host.add_command(command)


@host.command(name="lock")
@click.option("--target", "target", help="The system and processor, such as ubuntu-24.04/amd64.")
@click.option(
    "--repository",
    "address",
    envvar="SM120_HOST_REPOSITORY",
    help="Address or folder of NVIDIA's repository for that system, or of your mirror of it.",
)
@click.option(
    "--keyring",
    type=click.Path(path_type=Path),
    envvar="SM120_HOST_KEYRING",
    help="The repository's public key, armored or binary.",
)
@click.option("--suite", help="The suite, where the repository is not a flat one.")
@click.option("--component", "components", multiple=True, default=["main"], show_default=True)
@click.option("--diff", "only_diff", is_flag=True, help="Show what would move; write nothing.")
@click.option("--check", is_flag=True, help="Only check that the lock answers the spec; offline.")
@json_option
@click.pass_context
def lock(
    context: click.Context,
    target: str | None,
    address: str | None,
    keyring: Path | None,
    suite: str | None,
    components: tuple[str, ...],
    only_diff: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Look up exact packages for lockfiles/host.yaml and write lockfiles/host.lock.yaml.

    One run locks one system; the others in the lock stay as they are. The lock names no place, so
    a mirror without a way out serves as well as NVIDIA's own repository.
    """
    from pipeline.lock.host import lock_target, read_package_index, refused_key
    from pipeline.spec.host import read_host_spec

    checkout = checkout_of(context)
    spec = read_host_spec(checkout)
    if check:
        return _check(checkout, spec, target, as_json)
    if target is None or address is None or keyring is None:
        raise SpecInvalid(
            "a lock needs a system, a repository and its key",
            "sm120 host lock --target ubuntu-24.04/amd64 --repository ADDRESS --keyring KEY",
        )
    _require_target(spec, target)
    with log.step(f"Locking the packages of {target}"):
        repository = _repository(address, keyring, suite, components)
        index = read_package_index(repository, target.partition("/")[2])
        new = lock_target(spec, target, index)
    _warn_of_key(target, refused_key(target, index))
    moves = _written(checkout, spec, target, new, only_diff)
    if as_json:
        return say_json(moves)
    _say(moves, only_diff)


def _warn_of_key(target: str, key: str) -> None:
    """A good lock that the hosts could not install from: say so before they are touched."""
    if key:
        log.say(
            f"Warning: apt on {target} will refuse this repository: its key {key} is bound by\n"
            "SHA-1 only, which apt there rejects since 2026-02-01. Use the repository that NVIDIA\n"
            "signs with a newer key for this system, or a mirror that you sign yourself;\n"
            "ansible/README.md shows the ways."
        )


def _require_target(spec: HostSpec, target: str) -> None:
    if target not in spec.targets:
        raise SpecInvalid(
            f"lockfiles/host.yaml does not name {target} (only {', '.join(spec.targets)})",
            "Choose one of its targets, or add this one.",
        )


def _repository(
    address: str, keyring: Path, suite: str | None, components: tuple[str, ...]
) -> Repository:
    from pipeline.fetch.http import Client
    from pipeline.fetch.settings import read_settings
    from pipeline.fetch.sources import read_below
    from pipeline.lock.host import Repository

    client = Client(read_settings())
    return Repository(
        lambda path, most_bytes: read_below(client, [address], path, most_bytes),
        keyring,
        suite,
        tuple(components),
    )


def _written(
    checkout: Checkout, spec: HostSpec, target: str, new: TargetLock, only_diff: bool
) -> list[Row]:
    """Put the new pins beside those of the other systems; what moved."""
    from pipeline.lock.host_model import host_lock_path, sealed_host, write_host_lock

    path = host_lock_path(checkout)
    old = _old_lock(path)
    before = old.targets.get(target) if old else None
    # pins that answer another spec are dropped, not kept beside the new ones
    others = old.targets if old and old.spec == spec.digest() else {}
    if not only_diff:
        write_host_lock(path, sealed_host(spec, {**others, target: new}))
    return _moves(before, new)


def _old_lock(path: Path) -> HostLock | None:
    from pipeline.lock.host_model import read_host_lock

    try:
        return read_host_lock(path)
    except (LockMissing, LockEdited):
        return None


def _moves(before: TargetLock | None, after: TargetLock) -> list[Row]:
    old = before.pins() if before else {}
    new = after.pins()
    rows: list[Row] = []
    for name in sorted({*old, *new}):
        was, now = old.get(name), new.get(name)
        if was != now:
            before_it = was.version if was else None
            rows.append({"name": name, "before": before_it, "after": now.version if now else None})
    return rows


def _say(moves: list[Row], only_diff: bool) -> None:
    if not moves:
        click.echo("nothing moves" if only_diff else "locked; nothing moved")
        return
    rows = [[str(m["name"]), m["before"] or "-", m["after"] or "-"] for m in moves]
    click.echo(log.table(["package", "before", "after"], rows))
    click.echo(f"\n{len(moves)} {'would move' if only_diff else 'moved'}")


def _check(checkout: Checkout, spec: HostSpec, target: str | None, as_json: bool) -> None:
    from pipeline.lock.host_model import current_host_lock, host_lock_path

    held = current_host_lock(host_lock_path(checkout), spec)
    if target is not None and target not in held.targets:
        raise LockMissing(
            f"host.lock.yaml: has no packages for {target}", "Make them with `sm120 host lock`."
        )
    rows = {name: len(found.pins()) for name, found in held.targets.items()}
    if as_json:
        return say_json({"seal": held.seal, "spec": held.spec, "targets": rows})
    for name, count in rows.items():
        click.echo(f"{name}: {count} packages, current")
