"""`sm120 uninstall`: what this command made on a machine, listed and taken away."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pipeline import log
from pipeline.attest.keyring import DEFAULT, default_folder
from pipeline.cli.context import checkout_or_none, say_json
from pipeline.cli.options import json_option
from pipeline.cli.signing import own_trust_file
from pipeline.errors import DockerUnavailable, KeyInvalid
from pipeline.files import os_errors_explained, remove_tree
from pipeline.model import Frozen
from pipeline.oci.docker import connect, own_tags, untag
from pipeline.spec.checkout import Checkout
from pipeline.store.remove import own_parts, remove_store, total_bytes
from pipeline.store.store import Store, default_root
from pipeline.store.upkeep import stats_below

if TYPE_CHECKING:
    from docker import DockerClient

What = Literal["store", "Docker tag", "environment", "key", "trust file"]
# Only these are kept unless they are asked for: a key that is lost cannot be made again.
_PRECIOUS = ("key", "trust file")


class Item(Frozen):
    """One thing that can go."""

    what: What
    where: str
    size_bytes: int
    goes: bool = True


@click.command()
@click.option("--keys", is_flag=True, help="Remove your keys and your own trust file, too.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@json_option
@click.pass_context
def uninstall(context: click.Context, keys: bool, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Remove what this command made here: the store, tags in Docker, environments of a checkout.

    All of it is listed first, and you are asked. Keys and your own trust file go only with --keys:
    what a lost key signed cannot be signed again. Nothing else is touched: weights, results,
    images under names that you chose and the checkout itself stay where they are.
    """
    root = context.obj["store"] or default_root()
    client = _docker()
    items = [
        *_store_items(root),
        *_tag_items(client),
        *_key_items(goes=keys),
        # last: this very program may run from one of them
        *_environment_items(checkout_or_none(context)),
    ]
    going = [item for item in items if item.goes]
    if not as_json:
        _show(items)
    if not going or dry_run or not (yes or (not as_json and _agrees(going))):
        return _end(items, as_json, is_done=False, dry_run=dry_run)
    _remove(going, Store(root), client)
    _end(items, as_json, is_done=True, dry_run=False)


def _docker() -> DockerClient | None:
    try:
        return connect()
    except DockerUnavailable as error:
        log.say(f"{error}: tags of images in it are not listed")
        return None


def _store_items(root: Path) -> list[Item]:
    parts = own_parts(root)
    return [Item(what="store", where=str(root), size_bytes=total_bytes(root))] if parts else []


def _tag_items(client: DockerClient | None) -> list[Item]:
    tags = own_tags(client) if client else []
    return [Item(what="Docker tag", where=t.tag, size_bytes=t.size_bytes) for t in tags]


def _key_items(*, goes: bool) -> list[Item]:
    with suppress(KeyInvalid):  # a user id without an account has no keys
        folder = default_folder(os.environ)
        # a file of another kind in that folder is not one of `new-key`
        halves = [p for p in sorted(folder.glob("*.p[eu][mb]")) if p.suffix in (".pem", ".pub")]
        paths = [*halves, *folder.glob(DEFAULT)]
        items = [_file("key", path, goes=goes) for path in paths if path.is_file()]
        trust = own_trust_file()
        more = [_file("trust file", trust, goes=goes)] if trust and trust.is_file() else []
        return [*items, *more]
    return []


def _file(what: What, path: Path, *, goes: bool) -> Item:
    return Item(what=what, where=str(path), size_bytes=path.lstat().st_size, goes=goes)


def _environment_items(checkout: Checkout | None) -> list[Item]:
    """Environments that noxfile.py made: each has the digest of its lock in it."""
    if checkout is None or (checkout.root / ".nox").is_symlink():
        return []
    locks = sorted((checkout.root / "lockfiles" / "tool").glob("*.txt"))
    homes = [checkout.root / ".nox" / lock.stem for lock in locks]
    return [
        Item(
            what="environment",
            where=str(home),
            size_bytes=sum(s.st_size for s in stats_below(home)),
        )
        for home in homes
        if (home / "locked").is_file() and not home.is_symlink()
    ]


def _show(items: list[Item]) -> None:
    if not items:
        return click.echo("nothing of this command is here")
    rows = [
        [item.what, item.where, log.size(item.size_bytes), "" if item.goes else "kept (--keys)"]
        for item in items
    ]
    click.echo(log.table(["what", "where", "size", ""], rows))


def _agrees(going: list[Item]) -> bool:
    # in a script nobody can answer, and silence is no yes
    if not sys.stdin.isatty():
        return False
    count = log.count(len(going), "thing")
    return click.confirm(f"\nRemove {count}?", err=True)


def _remove(going: list[Item], store: Store, client: DockerClient | None) -> None:
    refused = []
    for item in going:
        if item.what == "store":
            for path in remove_store(store):
                log.say(f"{path}: is not the store's own, and stays")
        elif item.what == "Docker tag" and client and (why := untag(client, item.where)):
            refused.append(f"{item.where}: {why}")
        elif item.what in _PRECIOUS:
            _remove_file(Path(item.where))
        elif item.what == "environment":
            remove_tree(Path(item.where))
    if refused:
        hint = "All else is removed. `sm120 recipe stop RECIPE` ends a container; then try again."
        raise DockerUnavailable(f"Docker keeps {'; '.join(refused)}", hint)


def _remove_file(path: Path) -> None:
    with os_errors_explained(path):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # what else lies there is not ours
        path.parent.rmdir()


def _end(items: list[Item], as_json: bool, *, is_done: bool, dry_run: bool) -> None:
    if as_json:
        return say_json(
            {"removed": is_done, "items": [item.model_dump(mode="json") for item in items]}
        )
    if is_done:
        click.echo(f"\n{log.count(sum(item.goes for item in items), 'thing')} removed")
    elif items:
        click.echo("\nnothing was removed" + ("" if dry_run else "; `--yes` removes it"))
